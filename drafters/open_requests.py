"""The open requests of a drafter, and the base of drafters that keep nothing but their state.

Queries and commits are checked against the state: an unknown request or another length is an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from ..core.arrays import Int32, Int64
from ..core.errors import DrafterError
from ..core.proposals import Commit, DraftRequest, Proposal, Query


class Tracked(Protocol):
    """The state that a drafter keeps of a request."""

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
    """States of open requests by request id. `source` names the drafter in errors."""

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
        """The state of a query's request.

        Raises `DrafterError` for an unknown request or another length.
        """
        return self._at(query.request_id, query.committed_len)

    def of_commit(self, commit: Commit) -> S:
        """The state of a commit's request.

        Raises `DrafterError` for an unknown request or another length.
        """
        return self._at(commit.request_id, commit.base_len)

    def find(self, request_id: str) -> S | None:
        """The state of a request; None if it is unknown."""
        return self._states.get(request_id)

    def drop(self, request_id: str) -> S | None:
        """Forget a request and return its state; None if it is unknown."""
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


class RequestsDrafter(ABC, Generic[S]):
    """The part of a `Drafter` that keeps a state for each open request."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._requests: OpenRequests[S] = OpenRequests(name)

    @property
    def name(self) -> str:
        """The `source` of the proposals."""
        return self._name

    @property
    def memory_bytes(self) -> int:
        """About the bytes that the states of all open requests take."""
        return self._requests.memory_bytes

    def close(self, request_id: str) -> None:
        """Forget a request; an unknown id is ignored."""
        self._requests.drop(request_id)


class StatefulDrafter(RequestsDrafter[S]):
    """A `Drafter` that answers each query at once, from the state of its request alone.

    Subclasses say what a request's state is, what a commit changes in it, and what is proposed.
    """

    def open(self, request: DraftRequest) -> None:
        """Begin a request. Raises `DrafterError` if it has no committed token."""
        self._requests.put(request.request_id, self._state(request))

    def propose(self, queries: Sequence[Query], deadline: float | None = None) -> list[Proposal]:  # noqa: ARG002
        """One proposal a query; ignores the deadline, since it needs microseconds.

        Raises `DrafterError` for an unknown request or another length.
        """
        return [self._propose(self._requests.of_query(query), query) for query in queries]

    def observe(self, commits: Sequence[Commit]) -> None:
        """Learn what was committed. Raises `DrafterError` for a commit that does not fit."""
        for commit in commits:
            self._learn(self._requests.of_commit(commit), commit)

    @abstractmethod
    def _state(self, request: DraftRequest) -> S:
        """The state of a request that opens."""

    @abstractmethod
    def _learn(self, state: S, commit: Commit) -> None:
        """Add a commit that fits to its request's state."""

    @abstractmethod
    def _propose(self, state: S, query: Query) -> Proposal:
        """What goes on from the text, or from what is assumed to follow it; changes nothing."""


# Texts that open are appended in pieces, since what is forgotten may make room for what follows.
PIECE_LEN = 1024
NO_TOKENS = np.empty(0, dtype=np.int32)
PATH_OF = attrgetter("assumed")


class _Growing(Tracked, Protocol):
    """The state of a request whose text is appended to in arrays."""

    def reserve(self, count: int) -> None:
        """Count further tokens as committed, and make room for them; they are appended soon."""
        ...


G = TypeVar("G", bound=_Growing)


class AssumedTokens(NamedTuple):
    """What is assumed to follow the texts of a batch, one behind the other.

    tokens  int32 [n]
    ends    int64 [texts]  where those of each text end
    """

    tokens: Int32
    ends: Int64

    @classmethod
    def none(cls, num_texts: int) -> AssumedTokens:
        """Nothing is assumed to follow any."""
        return cls(NO_TOKENS, np.zeros(num_texts, dtype=np.int64))

    @classmethod
    def of(cls, queries: Sequence[Query]) -> AssumedTokens:
        """Of these queries, one a text."""
        if not any(map(PATH_OF, queries)):
            return cls.none(len(queries))
        paths = [query.assumed or () for query in queries]
        tokens = np.fromiter(chain.from_iterable(paths), dtype=np.int32)
        return cls(tokens, np.array(list(accumulate(map(len, paths))), dtype=np.int64))

    @property
    def places(self) -> list[int]:
        """Which texts tokens are assumed to follow."""
        if not len(self.tokens):
            return []
        return np.flatnonzero(np.diff(self.ends, prepend=0)).tolist()

    def path(self, place: int) -> Int32:
        """int32 [n]: what is assumed to follow the text at `place`."""
        return self.tokens[self.ends[place - 1] if place else 0 : self.ends[place]]


class BatchedDrafter(RequestsDrafter[G]):
    """A `Drafter` that does for all requests of a message in one compiled call what
    `StatefulDrafter` does for each.
    """

    def open(self, request: DraftRequest) -> None:
        """Begin a request. Raises `DrafterError` if it has no committed token."""
        state = self._state(request)
        for first in range(0, len(request.token_ids), PIECE_LEN):
            piece = request.token_ids[first : first + PIECE_LEN]
            state.reserve(len(piece))
            self._extend_all([state], [piece])
        self._requests.put(request.request_id, state)

    def propose(
        self,
        queries: Sequence[Query],
        deadline: float | None = None,  # noqa: ARG002
    ) -> Sequence[Proposal]:
        """One proposal a query; ignores the deadline, since it needs microseconds.

        Raises `DrafterError` for an unknown request or another length.
        """
        if not queries:
            return []
        states = [self._requests.of_query(query) for query in queries]
        assumed = AssumedTokens.of(queries)
        return self._propose_all(states, [max(query.max_nodes, 0) for query in queries], assumed)

    def observe(self, commits: Sequence[Commit]) -> None:
        """Learn what was committed. Raises `DrafterError` for a commit that does not fit; those
        before it are learned."""
        states: list[G] = []
        tokens: list[Int32] = []
        try:
            for commit in commits:
                state = self._requests.of_commit(commit)
                state.reserve(len(commit.tokens))
                states.append(state)
                tokens.append(commit.tokens)
        finally:
            if states:
                self._extend_all(states, tokens)

    @abstractmethod
    def _state(self, request: DraftRequest) -> G:
        """The state of a request that opens, of no token yet."""

    @abstractmethod
    def _extend_all(self, states: Sequence[G], tokens: Sequence[Int32]) -> None:
        """Append tokens, for which there is room, to each state's text; some may come twice."""

    @abstractmethod
    def _propose_all(
        self, states: Sequence[G], max_nodes: Sequence[int], assumed: AssumedTokens
    ) -> Sequence[Proposal]:
        """At most `max_nodes[i]` nodes behind each text and what is assumed to follow it."""
