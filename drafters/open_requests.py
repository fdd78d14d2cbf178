"""The open requests of a drafter, and the checks that queries and commits fit them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from ..core.errors import DrafterError
from ..core.proposals import Commit, Query


class Tracked(Protocol):
    """What a drafter keeps of a request knows at least how many tokens are committed."""

    @property
    def committed_len(self) -> int:
        """Prompt and generated tokens so far."""
        ...

    @property
    def memory_bytes(self) -> int:
        """About the bytes that this takes."""
        ...


S = TypeVar("S", bound=Tracked)


class OpenRequests(Generic[S]):
    """State by request id. `source` names the drafter in errors."""

    __slots__ = ("_source", "_states")

    def __init__(self, source: str) -> None:
        self._source = source
        self._states: dict[str, S] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[S]:
        return iter(self._states.values())

    @property
    def memory_bytes(self) -> int:
        """About the bytes of all states."""
        # A copy, because metrics are read in another thread.
        return sum(state.memory_bytes for state in list(self._states.values()))

    def put(self, request_id: str, state: S) -> None:
        """Keep a request's state in the place of an earlier one.

        Raises `DrafterError` if nothing is committed: there is no root to continue.
        """
        if state.committed_len == 0:
            raise DrafterError(f"{self._source}: request {request_id} opened without a token")
        self._states[request_id] = state

    def of_query(self, query: Query) -> S:
        """Raises `DrafterError` for an unknown request or another length."""
        return self._at(query.request_id, query.committed_len)

    def of_commit(self, commit: Commit) -> S:
        """Raises `DrafterError` for an unknown request or another length."""
        return self._at(commit.request_id, commit.base_len)

    def drop(self, request_id: str) -> S | None:
        """Forget a request; None if it is unknown."""
        return self._states.pop(request_id, None)

    def _at(self, request_id: str, committed_len: int) -> S:
        state = self._states.get(request_id)
        if state is None:
            raise DrafterError(f"{self._source}: request {request_id} is not open; open it first")
        if state.committed_len != committed_len:
            raise DrafterError(
                f"{self._source}: request {request_id} has {state.committed_len} committed tokens "
                f"here, {committed_len} there; open it again"
            )
        return state
