"""The engine's side of the socket: one frame a step, bounded queues, and what dies or hangs."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from draftline.core.errors import (
    CapacityError,
    DraftlineError,
    EngineClosed,
    EngineFailed,
    ReaderTooSlow,
    StageLost,
)
from draftline.core.request.output import TARGET_SOURCE, Delta, FinishReason, RequestMetrics
from draftline.core.request.sampling_params import RequestOptions, SamplingParams
from draftline.deploy.engine.stats import EngineStats
from draftline.deploy.engine_process import client as clients
from draftline.deploy.engine_process import messages as connections
from draftline.deploy.engine_process.messages import Beat, Connection, Hello, decode_from_engine
from support.fakes.fake_engine import engine_stats
from support.servers.http_server import until
from support.servers.split_engine import split_engine

pytestmark = pytest.mark.net

PARAMS = SamplingParams(max_tokens=50)
METRICS = RequestMetrics(prompt_tokens=3, generated_tokens=1, num_steps=0, num_draft_tokens=0)


class SteppedEngine:
    """An engine whose steps the test makes, in a thread that stands for the engine's."""

    max_model_len = 100

    def __init__(self, capacity: int = 64) -> None:
        self.capacity = capacity
        self.sinks: dict[str, Callable[[Delta | DraftlineError], None]] = {}
        self.cancelled: list[str] = []
        self.healthy = True
        self._after: list[Callable[[], object]] = []

    async def add(
        self, request_id: str, prompt: Any, params: Any, options: Any, sink: Any, *, with_text: bool
    ) -> None:
        assert not with_text
        self.sinks[request_id] = sink

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def retry_after_s(self) -> int:
        return 7

    def after_step(self, function: Callable[[], object]) -> None:
        self._after.append(function)

    def stats(self) -> EngineStats:
        return engine_stats()

    def is_healthy(self) -> bool:
        return self.healthy

    async def step(self, size: int = 1, finish_reason: FinishReason | None = None) -> None:
        """Every request gets tokens, in another thread, and the step ends."""

        def commit() -> None:
            for request_id, sink in self.sinks.items():
                delta = Delta(
                    request_id=request_id, token_ids=(65,) * size, text="",
                    sources=(TARGET_SOURCE,) * size, finish_reason=finish_reason,
                    metrics=None if finish_reason is None else METRICS,
                )  # fmt: skip
                sink(delta)
            after, self._after = self._after, []
            for function in after:
                function()

        thread = threading.Thread(target=commit)
        thread.start()
        # The thread may end before this one runs again: the loop gets a turn all the same.
        await asyncio.sleep(0)
        while thread.is_alive():  # noqa: ASYNC110 - the loop is to run meanwhile
            await asyncio.sleep(0)


def stream(client: Any, name: str) -> AsyncGenerator[Delta, None]:
    return client.stream([1, 2, 3], PARAMS, RequestOptions(), request_id=name)


async def begun(engine: SteppedEngine, client: Any, count: int) -> list[asyncio.Task[Delta]]:
    """So many requests that wait for their first delta."""
    waiting = [asyncio.create_task(anext(stream(client, f"r{index}"))) for index in range(count)]
    await until(lambda: len(engine.sinks) == count)
    return waiting


async def test_a_step_is_one_frame_and_so_are_adds_and_cancels(checkpoint: Any) -> None:
    engine = SteppedEngine()
    async with split_engine(engine, str(checkpoint)) as split:
        streams = [stream(split.client, f"r{index}") for index in range(8)]
        there, here = split.client._connection, split.session.connection
        received, sent = here.num_frames_received, there.num_frames_sent
        waiting = [asyncio.create_task(anext(one)) for one in streams]
        await until(lambda: len(engine.sinks) == 8)
        assert there.num_frames_sent - sent == 1
        assert here.num_frames_received - received == 1
        received = there.num_frames_received
        await engine.step()
        assert [delta.token_ids for delta in await asyncio.gather(*waiting)] == [(65,)] * 8
        assert there.num_frames_received - received == 1
        sent = there.num_frames_sent
        await asyncio.gather(*(one.aclose() for one in streams))
        await until(lambda: len(engine.cancelled) == 8)
        assert there.num_frames_sent - sent == 1
        assert split.session.num_running == 0


async def test_an_ended_answer_is_not_cancelled(checkpoint: Any) -> None:
    engine = SteppedEngine()
    async with split_engine(engine, str(checkpoint)) as split:
        one = stream(split.client, "a")
        first = asyncio.create_task(anext(one))
        await until(lambda: bool(engine.sinks))
        await engine.step(finish_reason="length")
        assert (await first).finish_reason == "length"
        assert [delta async for delta in one] == []
        assert (engine.cancelled, split.session.num_running) == ([], 0)


async def test_a_flood_is_refused(checkpoint: Any) -> None:
    engine = SteppedEngine(capacity=2)
    async with split_engine(engine, str(checkpoint)) as split:
        waiting = await begun(engine, split.client, 2)
        with pytest.raises(CapacityError) as raised:
            await anext(stream(split.client, "more"))
        assert raised.value.retry_after_s == 7
        await engine.step()
        assert len(await asyncio.gather(*waiting)) == 2


async def test_a_flood_of_one_tenant_leaves_another_its_part(checkpoint: Any) -> None:
    engine = SteppedEngine(capacity=4)
    async with split_engine(engine, str(checkpoint)) as split:
        waiting = await begun(engine, split.client, 4)
        options = RequestOptions(tenant="quiet")

        def ask(name: str) -> AsyncGenerator[Delta, None]:
            return split.client.stream([1], PARAMS, options, request_id=name)

        waiting += [asyncio.create_task(anext(ask(f"q{number}"))) for number in range(2)]
        await until(lambda: len(engine.sinks) == 6)
        with pytest.raises(CapacityError):
            await anext(ask("q2"))
        await engine.step()
        assert len(await asyncio.gather(*waiting)) == 6


async def test_an_api_process_that_reads_nothing_does_not_fill_the_engines_memory(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_UNSENT_BYTES", 100_000)
    engine = SteppedEngine()
    async with split_engine(engine, str(checkpoint)) as split:
        waiting = await begun(engine, split.client, 4)
        assert split.client._connection._transport is not None
        split.client._connection._transport.pause_reading()
        for _ in range(400):
            await engine.step(size=500)
        transport = split.session.connection._transport
        assert transport is not None
        assert sorted(engine.cancelled) == ["r0", "r1", "r2", "r3"]
        assert 100_000 < transport.get_write_buffer_size() < 200_000
        split.client._connection._transport.resume_reading()
        # What came before is read still; then comes the error.
        assert len(await asyncio.gather(*waiting)) == 4


async def test_a_reader_that_is_slow_ends_its_request_alone(checkpoint: Any) -> None:
    engine = SteppedEngine()
    async with split_engine(engine, str(checkpoint), max_unread_bytes=65536) as split:
        slow, quick = stream(split.client, "slow"), stream(split.client, "quick")
        first = [asyncio.create_task(anext(one)) for one in (slow, quick)]
        await until(lambda: len(engine.sinks) == 2)
        await engine.step()
        await asyncio.gather(*first)
        for _ in range(8):
            await engine.step(size=200)
            await anext(quick)
        with pytest.raises(ReaderTooSlow):
            await anext(slow)
        await until(lambda: engine.cancelled == ["slow"])
        await quick.aclose()


async def test_requests_of_a_lost_api_process_are_cancelled(checkpoint: Any) -> None:
    engine = SteppedEngine()
    async with split_engine(engine, str(checkpoint)) as split:
        waiting = await begun(engine, split.client, 3)
        split.client._connection.abort()
        await split.session.closed
        assert sorted(engine.cancelled) == ["r0", "r1", "r2"]
        with pytest.raises(EngineFailed):
            await waiting[0]
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_requests_of_a_lost_engine_end_with_an_error(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "CONTROL_TIMEOUT_S", 0.05)
    engine = SteppedEngine()
    async with split_engine(engine, str(checkpoint)) as split:
        waiting = await begun(engine, split.client, 3)
        split.session.connection.abort()
        for one in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(one, EngineFailed)
        assert split.client.lost.result(0) == "its process is gone"
        assert not await split.client.is_healthy()
        with pytest.raises(EngineFailed):
            await anext(stream(split.client, "late"))
        assert await split.client.stats() == []


async def test_a_silent_engine_ends_requests_until_it_speaks_again(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "BEAT_S", 0.05)
    monkeypatch.setattr(connections, "START_SILENCE_S", 0.0)
    engine = SteppedEngine()
    async with split_engine(engine, str(checkpoint), silence_s=0.5) as split:
        waiting = await begun(engine, split.client, 2)
        transport = split.client._connection._transport
        assert transport is not None
        transport.pause_reading()
        for one in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(one, StageLost)
        assert not await split.client.is_healthy()
        with pytest.raises(StageLost, match="does not answer"):
            await anext(stream(split.client, "late"))
        transport.resume_reading()
        async with asyncio.timeout(20):
            while not await split.client.is_healthy():  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.01)
        assert sorted(engine.cancelled) == ["r0", "r1"]


async def test_a_silent_api_process_is_cut_off(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "BEAT_S", 0.05)
    engine = SteppedEngine()
    async with split_engine(engine, str(checkpoint)) as split:
        waiting = await begun(engine, split.client, 2)
        split.session.connection.silence_s = 0.3
        # It beats more often than that, as long as it beats.
        num_frames = split.session.connection.num_frames_received
        await until(lambda: split.session.connection.num_frames_received > num_frames + 8)
        assert not split.session.closed.done()
        monkeypatch.setattr(split.client._connection, "_on_beat", lambda: None)
        assert split.client._connection._timer is not None
        split.client._connection._timer.cancel()
        await split.session.closed
        assert sorted(engine.cancelled) == ["r0", "r1"]
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_health_is_what_the_engine_said_last(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "BEAT_S", 0.05)
    engine = SteppedEngine()
    async with split_engine(engine, str(checkpoint)) as split:
        assert await split.client.is_healthy()
        engine.healthy = False
        async with asyncio.timeout(20):
            while await split.client.is_healthy():  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.01)


async def test_a_closed_client_ends_its_requests(checkpoint: Any) -> None:
    engine = SteppedEngine()
    async with split_engine(engine, str(checkpoint)) as split:
        waiting = await begun(engine, split.client, 2)
        await split.client.close()
        for one in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(one, EngineClosed)
        with pytest.raises(EngineClosed):
            await anext(stream(split.client, "late"))
        assert not split.client.lost.done()


async def test_garbage_ends_the_connection() -> None:
    lost = asyncio.Event()
    here, there = socket.socketpair()
    here.setblocking(False)
    connection = Connection(
        decode_from_engine,
        on_message=lambda _: None,
        on_lost=lost.set,
        on_silence=lambda: None,
        beat=Beat,
    )
    await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=here)
    with there:
        there.sendall(b"\x00\x00\x00\x00\x00\x00\x00\x02\xc1\xc1")
        async with asyncio.timeout(20):
            await lost.wait()
    assert connection.is_lost
    # Saying more is of no use, and no error.
    connection.send(Hello(3))
    await asyncio.sleep(0)
