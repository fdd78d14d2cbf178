"""When Ray Serve should replace a replica, and when a stream's silence ends it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator

import pytest
from draftline.core.errors import StageLost
from draftline.deploy.ray_serve.deployment_plan import ReplicaHealth, priority_warning
from draftline.deploy.ray_serve.resume import with_heartbeats, without_heartbeats

BEAT_S, SILENCE_S = 0.01, 0.05


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_recovery_has_its_time_and_no_more() -> None:
    clock = Clock()
    health = ReplicaHealth(60.0, clock)
    assert health.problem("ready") is None
    clock.now = 1000.0
    assert health.problem("recovering") is None
    clock.now += 60.0
    assert health.problem("recovering") is None
    clock.now += 0.1
    assert "recovering for more than 60 s" in (health.problem("recovering") or "")


def test_who_runs_behind_all_else_is_told_how_not_to() -> None:
    assert priority_warning(0) is None
    assert priority_warning(-5) is None
    warning = priority_warning(15)
    assert warning is not None
    assert "niceness=15" in warning
    assert "RAY_worker_niceness=0" in warning


def test_each_recovery_begins_anew() -> None:
    clock = Clock()
    health = ReplicaHealth(10.0, clock)
    for _ in range(3):
        assert health.problem("recovering") is None
        clock.now += 9.0
        assert health.problem("recovering") is None
        assert health.problem("ready") is None


def test_a_failed_engine_is_replaced_at_once() -> None:
    assert ReplicaHealth(60.0, Clock()).problem("failed") is not None


class Source:
    """Items that come when they are put; notes whether it was closed."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[int | None] = asyncio.Queue()
        self.is_closed = False

    async def stream(self) -> AsyncGenerator[int, None]:
        try:
            while (item := await self.items.get()) is not None:
                yield item
        finally:
            self.is_closed = True


async def served() -> bool:
    return True


async def not_served() -> bool:
    return False


async def test_a_quiet_stream_shows_that_it_lives() -> None:
    source = Source()
    beating = with_heartbeats(source.stream(), BEAT_S)
    assert await anext(beating) is None
    source.items.put_nowait(3)
    items = [item async for item in _until(beating, 3)]
    assert items[-1] == 3
    await beating.aclose()
    assert source.is_closed


async def test_items_pass_and_signs_of_life_do_not() -> None:
    source = Source()
    alive = without_heartbeats(with_heartbeats(source.stream(), BEAT_S), SILENCE_S, not_served)
    reading = asyncio.ensure_future(_all(alive))
    # Longer than the silence that would end a stream without signs of life.
    await asyncio.sleep(3 * SILENCE_S)
    for item in (1, 2, None):
        source.items.put_nowait(item)
    assert await reading == [1, 2]
    assert source.is_closed


async def test_a_replica_that_falls_silent_ends_its_stream() -> None:
    source = Source()
    source.items.put_nowait(1)
    alive = without_heartbeats(source.stream(), SILENCE_S, served)
    assert await anext(alive) == 1
    with pytest.raises(StageLost, match="silent"):
        await anext(alive)


async def test_a_request_that_waits_for_its_turn_goes_on_while_others_are_served() -> None:
    source = Source()
    alive = without_heartbeats(source.stream(), SILENCE_S, served)
    waiting = asyncio.ensure_future(anext(alive))
    await asyncio.sleep(3 * SILENCE_S)
    assert not waiting.done()
    source.items.put_nowait(7)
    assert await waiting == 7
    await alive.aclose()


async def test_a_request_that_no_replica_will_take_ends() -> None:
    alive = without_heartbeats(Source().stream(), SILENCE_S, not_served)
    with pytest.raises(StageLost, match="silent"):
        await anext(alive)


async def test_what_ray_makes_of_a_cancelled_wait_is_not_printed() -> None:
    printed: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: printed.append(context))
    alive = without_heartbeats(CancelledAsInRay(), SILENCE_S, served)
    waiting = asyncio.ensure_future(anext(alive))
    await asyncio.sleep(BEAT_S)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(BEAT_S)
    # asyncio prints it when the task is freed.
    del waiting, alive
    gc.collect()
    assert not printed


class CancelledAsInRay:
    def __aiter__(self) -> CancelledAsInRay:
        return self

    async def __anext__(self) -> int:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise RuntimeError("the request was cancelled") from None
        return 0


async def _until(items: AsyncGenerator[int | None, None], last: int) -> AsyncGenerator[int | None]:
    async for item in items:
        yield item
        if item == last:
            return


async def _all(items: AsyncGenerator[int, None]) -> list[int]:
    return [item async for item in items]
