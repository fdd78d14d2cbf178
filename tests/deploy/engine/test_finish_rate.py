"""`Retry-After` follows the queue."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import pytest
from draftline import AsyncEngine, EngineConfig, SamplingParams
from draftline.core.errors import CapacityError
from draftline.deploy.api.errors import to_api_error
from draftline.deploy.engine.async_engine import (
    MAX_RETRY_S,
    UNKNOWN_RETRY_S,
    FinishRate,
    retry_after_s,
)
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("waiting", "running", "rate", "seconds"),
    [
        (0, 0, 0.0, 1),
        (0, 4, 0.0, UNKNOWN_RETRY_S),
        (256, 16, 0.0, UNKNOWN_RETRY_S),
        (256, 16, 32.0, 8),
        (10, 16, 4.0, 3),
        (0, 16, 0.25, 4),
        (1, 1, 100.0, 1),
        (256, 16, 0.1, MAX_RETRY_S),
    ],
)
def test_seconds_until_the_queue_has_drained(
    waiting: int, running: int, rate: float, seconds: int
) -> None:
    assert retry_after_s(waiting, running, rate) == seconds


@given(st.integers(0, 10**6), st.integers(0, 10**4), st.floats(0, 10**6))
def test_it_is_never_silly_and_grows_with_the_queue(
    waiting: int, running: int, rate: float
) -> None:
    seconds = retry_after_s(waiting, running, rate)
    assert 1 <= seconds <= MAX_RETRY_S
    if rate:
        assert retry_after_s(waiting + 1, running + 1, rate) >= seconds


def test_the_rate_is_that_of_the_last_requests_until_now() -> None:
    rate = FinishRate(window=4)
    assert rate.per_second(5.0) == 0.0
    rate.finished(1.0)
    assert rate.per_second(5.0) == 0.0
    for end in (2.0, 3.0, 4.0, 5.0):
        rate.finished(end)
    assert rate.per_second(5.0) == pytest.approx(1.0)
    # Nothing has ended since.
    assert rate.per_second(32.0) == pytest.approx(0.1)


def test_it_survives_the_way_through_ray() -> None:
    error = CapacityError("the queue is full")
    assert to_api_error(error).headers == {"Retry-After": "1"}
    error.retry_after_s = 9
    assert to_api_error(pickle.loads(pickle.dumps(error))).headers == {"Retry-After": "9"}


async def test_an_engine_says_when_to_come_again(checkpoint: Path) -> None:
    # A token a step, so that the first request lasts until the others have come.
    config = EngineConfig(
        model=str(checkpoint), kv_cache_tokens=1024, max_num_seqs=1, max_queued_requests=1,
        multi_step_ms=0,
    )  # fmt: skip
    engine = AsyncEngine(config)
    await engine.start()
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    try:
        running = engine.stream("abc", long)
        await anext(running)
        waiting = asyncio.create_task(engine.generate("abc", long))
        async with asyncio.timeout(30):
            while not engine.stats().num_waiting:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.001)
        with pytest.raises(CapacityError) as caught:
            await engine.generate("abc", long)
        assert caught.value.retry_after_s == UNKNOWN_RETRY_S
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await running.aclose()
    finally:
        await engine.close()
