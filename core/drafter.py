"""What every drafter is: it opens requests, proposes, observes and closes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from .proposals import Commit, DraftRequest, Proposal, Query


class Drafter(Protocol):
    """Proposes continuations of requests. State is keyed by request id; what is learned from one
    request may serve others, but only those of its namespace and cache salt.

    One thread calls a drafter at a time. A drafter may be wrong or slow and only ever costs
    speed; what it raises ends its own answer, never a request.
    """

    @property
    def name(self) -> str:
        """The `source` of its proposals, unique in an engine."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Approximate bytes kept for open and of ended requests.

        A model's weights and KV cache, which never grow, do not count. Called now and then, so it
        must be cheap."""
        ...

    def open(self, request: DraftRequest) -> None:
        """Begin a request, or replace its state when it is known already."""
        ...

    def propose(self, queries: Sequence[Query], deadline: float | None = None) -> list[Proposal]:
        """One proposal a query, in order; empty where there is nothing to say.

        `deadline` is in seconds of the hub's clock, for drafters that can stop early. Does not
        change what later proposals of the same committed text would be.
        Raises `DrafterError` if a query does not fit the state (unknown id, other length).
        """
        ...

    def observe(self, commits: Sequence[Commit]) -> None:
        """Learn what was committed, in order, before the next `propose` of those requests."""
        ...

    def close(self, request_id: str) -> None:
        """Forget a request; an unknown id is ignored."""
        ...


@runtime_checkable
class OwningDrafter(Protocol):
    """A drafter that holds threads or connections."""

    def free(self) -> None:
        """Finish what waits, then end threads and close connections. The drafter is spent then."""
        ...
