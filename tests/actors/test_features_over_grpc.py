"""The target's features to a drafter server: in pieces, within bounds, only to those that read."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import grpc
import numpy as np
import pytest
from draftline.actors.drafter_process import DrafterProcess
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.drafting.options import features_of_target
from draftline.cluster.links import grpc_link, service, wire
from draftline.cluster.links.grpc_link import GrpcLink, GrpcOptions
from draftline.core.proposals import FeatureLayers, FeatureRows
from support.fakes.fake_drafters import CountingDrafter, FeatureReader
from support.servers.hub_session import LIMITS, QUICK_RETRY, HubSession, until

LAYERS = FeatureLayers((-1, 4), 16)


def whole_numbers(first: int, count: int) -> FeatureRows:
    """Rows that 16 bits hold as they are."""
    numbers = np.arange(first * LAYERS.row_len, (first + count) * LAYERS.row_len) % 251
    return FeatureRows("r", first, numbers.reshape(count, -1).astype(np.float32))


async def test_features_beyond_a_message_come_before_it_in_order(serve):
    """A kilobyte a message is 16 tokens."""
    drafter = FeatureReader(LAYERS)
    options = GrpcOptions(max_message_bytes=4096)
    link = GrpcLink("reading", await serve(drafter), options, features=LAYERS)
    hub = DrafterHub([link], LIMITS)
    await hub.start()
    session = HubSession(hub, prompt_len=300)
    hub.note_features([whole_numbers(0, 100), whole_numbers(100, 199)])
    assert await session.step()
    hub.note_features([whole_numbers(299, 2)])
    assert await session.step(2)
    (read,) = drafter.features.values()
    assert len(read) > 10
    assert [len(read[-1].values), read[-1].position] == [2, 299]
    assert np.array_equal(
        np.concatenate([rows.values for rows in read]), whole_numbers(0, 301).values
    )
    positions = [position for rows in read for position in places_of(rows)]
    assert positions == list(range(301))
    assert hub.stats()[0].errors == 0
    await hub.stop()


def places_of(rows: FeatureRows) -> range:
    return range(rows.position, rows.position + len(rows.values))


async def test_of_more_than_one_message_may_have_the_newest_are_sent(serve, monkeypatch):
    monkeypatch.setattr(grpc_link, "MAX_FEATURE_BYTES", 10 * 2 * LAYERS.row_len)
    drafter = FeatureReader(LAYERS)
    hub = DrafterHub([GrpcLink("reading", await serve(drafter), features=LAYERS)], LIMITS)
    await hub.start()
    session = HubSession(hub, prompt_len=300)
    hub.note_features([whole_numbers(0, 299)])
    assert await session.step()
    (read,) = drafter.features.values()
    assert [position for rows in read for position in places_of(rows)] == list(range(289, 299))
    await hub.stop()


@pytest.mark.parametrize("read", [None, LAYERS])
async def test_a_client_that_sends_features_that_nobody_reads_is_refused(serve, read):
    address = await serve(CountingDrafter("far") if read is None else FeatureReader(read, "far"))
    rows = FeatureRows("r", 0, np.ones((1, 5), dtype=np.float32))
    parts = [
        wire.encode_hello(wire.Greeting("far")),
        wire.encode_more_features([rows], 4096),
    ]
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(wire.METHOD)(iter(parts))
        answers = aiter(call)
        greeting = wire.decode_hello(await anext(answers))
        assert greeting == wire.Greeting("far", read)
        with pytest.raises(grpc.aio.AioRpcError, match="wire: features of 5 numbers") as caught:
            await anext(answers)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_client_that_sends_features_without_end_is_refused(serve, monkeypatch):
    monkeypatch.setattr(service, "MAX_FEATURE_BYTES", 1000)
    address = await serve(FeatureReader(LAYERS, "far"))
    more = wire.encode_more_features([whole_numbers(0, 5)], 4096)
    parts = [wire.encode_hello(wire.Greeting("far")), *[more] * 4]
    async with grpc.aio.insecure_channel(address) as channel:
        answers = aiter(channel.stream_stream(wire.METHOD)(iter(parts)))
        await anext(answers)
        with pytest.raises(grpc.aio.AioRpcError, match="more than 1000 bytes"):
            await anext(answers)


@pytest.mark.parametrize(
    ("read", "given", "setting"),
    [(LAYERS, FeatureLayers((4,), 16), "model: "), (LAYERS, None, "kind: "),
     (None, LAYERS, "kind: ")],
)  # fmt: skip
async def test_a_server_that_reads_other_states_is_named_and_left_out(
    serve, caplog, read, given, setting
):
    drafter = CountingDrafter("far") if read is None else FeatureReader(read, "far")
    hub = DrafterHub([GrpcLink("far", await serve(drafter), features=given)], LIMITS)
    await hub.start()
    assert await HubSession(hub).step(1) == []
    assert not hub.stats()[0].connected
    assert setting in caplog.text
    await hub.stop()


async def test_a_killed_head_drafts_again_for_a_request_from_the_states_that_follow():
    """Of what was committed before, its new server knows the tokens alone."""
    config = DrafterConfig(kind="head", name="far", model="demo-griffin")
    engine = EngineConfig(model="demo", drafters=(config,))
    given = features_of_target(engine)
    assert given is not None
    process = DrafterProcess(config, engine)
    options = GrpcOptions(address_timeout_s=60.0, token=process.token)
    link = GrpcLink("far", process.address, options, replace=process.replace, features=given)
    hub = DrafterHub([link], replace(QUICK_RETRY, vocab_size=4096, answer_timeout_s=30.0))
    await hub.start(timeout_s=120.0)
    session = HubSession(hub)
    rng = np.random.default_rng(3)

    async def drafts() -> bool:
        """Whether it drafts behind a token whose step handed out the state before it."""
        values = rng.normal(size=(1, given.row_len)).astype(np.float32)
        hub.note_features([FeatureRows("r", len(session.text) - 1, values)])
        return bool(await session.step(1))

    assert [await drafts() for _ in range(3)] == [True] * 3
    assert process._child is not None
    os.kill(process._child.pid, signal.SIGKILL)
    assert not await drafts()
    async with asyncio.timeout(120):
        await until(drafts, pause_s=0.1)
    assert [await drafts() for _ in range(3)] == [True] * 3
    assert hub.stats()[0].reconnects == 1
    await hub.stop()
    process.stop()
