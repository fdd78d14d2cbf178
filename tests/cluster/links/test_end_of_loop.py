"""An engine's loop that ends beside others: gRPC of one process tells any of its loops the news."""

from __future__ import annotations

import asyncio
import logging

import pytest
from draftline.cluster.engine.engine_thread import EngineThread
from draftline.cluster.links.grpc_link import GrpcLink
from support.fakes.fake_bench import Bench
from support.fakes.fake_drafters import CountingDrafter
from support.servers.hub_fixtures import Serve

ENGINES = 6


class Connected:
    """What a hub hears of its link: here only that it is up."""

    def __init__(self) -> None:
        self.up = asyncio.Event()

    def ready(self) -> None:
        self.up.set()

    def __getattr__(self, name: str) -> object:
        return lambda *_args, **_kwargs: None


class Parts:
    """An engine that does nothing but keep a link to a drafter server."""

    def __init__(self, address: str) -> None:
        self.core = Bench(num_blocks=1, nodes=0).core
        self._link = GrpcLink("far", address)

    async def start(self) -> None:
        events = Connected()
        self._link.connect(events)  # type: ignore[arg-type]
        await events.up.wait()

    async def recover(self) -> None:
        raise AssertionError

    async def stop(self) -> None:
        await self._link.close()


async def test_calls_are_over_before_their_loop_is_closed(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    address = await serve(CountingDrafter())

    async def build() -> Parts:
        return Parts(address)

    with caplog.at_level(logging.ERROR, "asyncio"):
        for _ in range(ENGINES):
            engine = EngineThread(build)  # type: ignore[arg-type]
            await asyncio.to_thread(engine.start)
            await asyncio.to_thread(engine.close)
            # What gRPC has to say of it arrives.
            await asyncio.sleep(0.05)
    assert not caplog.records
