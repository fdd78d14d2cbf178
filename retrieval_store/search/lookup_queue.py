"""Admission of lookup batches by deadline: a batch that would be late is refused at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from ...core.arrays import Int32
from ...core.errors import CapacityError
from ...core.interfaces import Lookup, Subtree

# Weight of the newest batch in the running mean of the time a context takes.
COST_WEIGHT = 0.25
# A refusal lowers the mean by this factor; otherwise one slow batch could block all others for
# ever.
REFUSAL_FACTOR = 0.9
MAX_WAITING = 8192


class LookupQueue:
    """Runs batches of lookups one after another on the event loop's thread.

    lookup       called with whole batches; it takes some ten microseconds a context, so that a
                 thread would cost more than it saves
    max_waiting  most contexts admitted and not yet answered
    clock        seconds; only differences count

    The event loop runs between two batches, so new ones are admitted or refused meanwhile.
    """

    def __init__(
        self,
        lookup: Lookup,
        max_waiting: int = MAX_WAITING,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._lookup = lookup
        self._max_waiting = max_waiting
        self._clock = clock
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._seconds_each = 0.0
        self._num_refused = 0

    @property
    def num_refused(self) -> int:
        """Batches refused since the start."""
        return self._num_refused

    async def lookup(
        self,
        contexts: Sequence[Int32],
        namespaces: Sequence[str],
        max_nodes: Sequence[int],
        *,
        time_left: float | None = None,
    ) -> list[Subtree]:
        """One subtree a context, as `Lookup.lookup`; `time_left` in seconds, None is endless.

        Raises `CapacityError` at once if the queue is full or the answer would be late, and later
        if it became late while it waited.
        """
        size = len(contexts)
        if self._num_waiting and self._num_waiting + size > self._max_waiting:
            raise self._refusal(f"{self._num_waiting} contexts are waiting")
        end = None if time_left is None else self._clock() + time_left
        self._require_time(self._num_waiting + size, end)
        self._num_waiting += size
        try:
            async with self._turn:
                await asyncio.sleep(0)
                self._require_time(size, end)
                return self._run(contexts, namespaces, max_nodes)
        finally:
            self._num_waiting -= size

    def _run(
        self, contexts: Sequence[Int32], namespaces: Sequence[str], max_nodes: Sequence[int]
    ) -> list[Subtree]:
        start = self._clock()
        subtrees = self._lookup.lookup(contexts, namespaces, max_nodes)
        each = (self._clock() - start) / max(1, len(contexts))
        mean = self._seconds_each + COST_WEIGHT * (each - self._seconds_each)
        # A faster batch replaces the mean at once: slower ones were delayed by other work.
        self._seconds_each = min(each, mean)
        return subtrees

    def _require_time(self, num_contexts: int, end: float | None) -> None:
        cost = num_contexts * self._seconds_each
        if end is not None and self._clock() + cost > end:
            raise self._refusal(f"{num_contexts} contexts take {cost:.2g} s")

    def _refusal(self, reason: str) -> CapacityError:
        self._num_refused += 1
        self._seconds_each *= REFUSAL_FACTOR
        return CapacityError(f"too late to be of use: {reason}")
