"""Admission by deadline, with a clock that only the lookups move."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from draftline.core.arrays import Int32
from draftline.core.errors import CapacityError
from draftline.core.lookup import Subtree
from draftline.retrieval_store.search.lookup_queue import LookupQueue
from support.fakes.fake_lookup import CountingLookup
from support.inputs.segments import context


class SlowLookup(CountingLookup):
    """Takes `seconds_each` of its own clock for a context."""

    def __init__(self, seconds_each: float) -> None:
        super().__init__(vocab_size=100)
        self.seconds_each = seconds_each
        self.now = 0.0
        self.num_batches = 0

    def lookup(
        self, contexts: Sequence[Int32], namespaces: Sequence[str], max_nodes: Sequence[int]
    ) -> list[Subtree]:
        self.now += self.seconds_each * len(contexts)
        self.num_batches += 1
        return super().lookup(contexts, namespaces, max_nodes)

    def clock(self) -> float:
        return self.now


def batch(size: int) -> tuple[list[Int32], list[str], list[int]]:
    return [context(1, index) for index in range(size)], ["n"] * size, [4] * size


async def learned(lookup: SlowLookup, max_waiting: int = 1000) -> LookupQueue:
    """A queue that knows what a context costs."""
    queue = LookupQueue(lookup, max_waiting, lookup.clock)
    for _ in range(40):
        await queue.lookup(*batch(1))
    lookup.num_batches = 0
    return queue


async def test_answers_are_the_lookups() -> None:
    lookup = SlowLookup(0.001)
    queue = LookupQueue(lookup, clock=lookup.clock)
    found = await asyncio.gather(*(queue.lookup(*batch(size)) for size in (3, 1, 2)))
    for size, answers in zip((3, 1, 2), found, strict=True):
        for near, far in zip(lookup.lookup(*batch(size)), answers, strict=True):
            assert np.array_equal(near.tokens, far.tokens)
    assert queue.num_refused == 0


async def test_a_batch_that_would_be_late_is_not_run() -> None:
    lookup = SlowLookup(0.01)
    queue = await learned(lookup)
    with pytest.raises(CapacityError, match="too late"):
        await queue.lookup(*batch(20), time_left=0.1)
    assert (lookup.num_batches, queue.num_refused) == (0, 1)
    assert len(await queue.lookup(*batch(20), time_left=0.3)) == 20
    assert len(await queue.lookup(*batch(20))) == 20


async def test_what_waits_before_a_batch_counts() -> None:
    lookup = SlowLookup(0.01)
    queue = await learned(lookup)
    calls = [queue.lookup(*batch(10), time_left=0.25) for _ in range(4)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(answer, CapacityError) for answer in found] == [False, False, True, True]
    # Who is admitted is answered: the refusals came before anything ran.
    assert lookup.num_batches == 2


async def test_a_batch_that_became_late_while_it_waited_is_not_run() -> None:
    lookup = SlowLookup(0.01)
    queue = await learned(lookup)
    lookup.seconds_each = 0.1
    calls = [queue.lookup(*batch(5), time_left=0.3) for _ in range(2)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(answer, CapacityError) for answer in found] == [False, True]
    assert lookup.num_batches == 1


async def test_the_queue_is_bounded() -> None:
    lookup = SlowLookup(0.001)
    queue = await learned(lookup, max_waiting=10)
    calls = [queue.lookup(*batch(4)) for _ in range(4)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(answer, CapacityError) for answer in found] == [False, False, True, True]
    # A batch larger than the bound is taken when nothing waits.
    assert len(await queue.lookup(*batch(11))) == 11


async def test_one_slow_batch_does_not_refuse_all_others_for_ever() -> None:
    lookup = SlowLookup(5.0)
    queue = LookupQueue(lookup, clock=lookup.clock)
    await queue.lookup(*batch(1))
    lookup.seconds_each = 0.0001
    for _ in range(200):
        try:
            await queue.lookup(*batch(1), time_left=0.1)
        except CapacityError:
            continue
        break
    num_refused = queue.num_refused
    assert 0 < num_refused < 100
    for _ in range(50):
        await queue.lookup(*batch(1), time_left=0.1)
    assert queue.num_refused == num_refused


async def test_a_caller_that_gives_up_leaves_the_queue() -> None:
    lookup = SlowLookup(0.001)
    queue = await learned(lookup, max_waiting=10)
    calls = [asyncio.ensure_future(queue.lookup(*batch(5))) for _ in range(2)]
    await asyncio.sleep(0)
    calls[1].cancel()
    await asyncio.wait(calls)
    assert calls[1].cancelled()
    found = await asyncio.gather(*(queue.lookup(*batch(5)) for _ in range(2)))
    assert [len(answers) for answers in found] == [5, 5]
