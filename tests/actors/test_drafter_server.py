"""The server over real connections: several coordinators, garbage, limits, TLS, kill -9."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from draftline.actors.drafter_server import DrafterServer, main
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.drafting.pool import DrafterPool
from draftline.cluster.links import wire
from draftline.cluster.links.access import TlsFiles
from draftline.cluster.links.grpc_link import GrpcLink, GrpcOptions
from draftline.cluster.links.link import DrafterLink, DrafterMessage
from draftline.core.errors import ConfigError
from draftline.core.proposals import DraftRequest, Query, empty_proposal
from support.fakes.fake_drafters import CountingDrafter, ScriptedDrafter
from support.servers.hub_session import LIMITS, QUICK_RETRY, HubSession, Rhyme, until
from support.servers.self_signed import self_signed_files


async def test_two_hubs_with_the_same_request_ids_do_not_mix(serve):
    drafter = CountingDrafter("far")
    address = await serve(drafter)
    hubs = [DrafterHub([GrpcLink("far", address)], LIMITS, budget_s=5.0) for _ in range(2)]
    for hub in hubs:
        await hub.start()
    sessions = [HubSession(hub, prompt_len=3 + 4 * index) for index, hub in enumerate(hubs)]
    for count in (0, 2, 1):
        for session in sessions:
            (proposal,) = await session.step(count)
            assert proposal.tokens.tolist() == session.expected(4)
    assert len(drafter.texts) == 2
    # What leaves with its connection is forgotten; the other stays.
    await hubs[0].stop()

    async def is_forgotten() -> bool:
        return len(drafter.texts) == 1

    await until(is_forgotten)
    (proposal,) = await sessions[1].step(1)
    assert proposal.tokens.tolist() == sessions[1].expected(4)
    await hubs[1].stop()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xff garbage",
        wire.encode_step(DrafterMessage(1, (), (), [], [], 0.0), 0.0, 4096),
    ],
)
async def test_a_garbage_client_is_refused_and_others_are_served(serve, data):
    address = await serve(CountingDrafter("far"))
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(wire.METHOD)(iter([data]))
        with pytest.raises(grpc.aio.AioRpcError, match="wire:") as caught:
            await anext(aiter(call))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    hub = DrafterHub([GrpcLink("far", address)], LIMITS)
    await hub.start()
    assert await HubSession(hub).step() != []
    await hub.stop()


@contextlib.asynccontextmanager
async def strange_server(*answers: bytes) -> AsyncIterator[str]:
    """Says hello, then answers every message with the next of `answers`, the last one for ever."""

    async def exchange(requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        await anext(requests)
        yield wire.encode_hello(wire.Greeting("far"))
        position = 0
        async for _ in requests:
            yield answers[min(position, len(answers) - 1)]
            position += 1

    service, method = wire.METHOD.strip("/").split("/")
    rpc = grpc.stream_stream_rpc_method_handler(exchange)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: rpc}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff\xff\xff",
        b"",
        b"x" * 5000,
        wire.encode_hello(wire.Greeting("far")),
        wire.encode_answer(DrafterMessage(77, (), (), [], [], 0.0), [], 4096),
        wire.encode_answer(
            DrafterMessage(1, (), (), [], [Query("another", 1, 4)], 0.0),
            [empty_proposal("far")],
            4096,
        ),
    ],
    ids=["garbage", "empty", "oversize", "hello", "stale", "another request"],
)
async def test_a_garbage_server_only_costs_its_proposals(answer):
    async with strange_server(answer) as address:
        link = GrpcLink("far", address, GrpcOptions(max_message_bytes=4096))
        hub = DrafterHub([link], QUICK_RETRY)
        await hub.start()
        session = HubSession(hub)
        for _ in range(5):
            assert await session.step(1, budget_s=0.05) == []
        assert hub.stats()[0].errors >= 1
        await hub.stop()


async def test_a_message_above_the_limit_is_not_sent(serve):
    drafter = CountingDrafter("far")
    link = GrpcLink("far", await serve(drafter), GrpcOptions(max_message_bytes=4096))
    hub = DrafterHub([link], QUICK_RETRY)
    await hub.start()
    hub.open(DraftRequest("long", np.zeros(5000, dtype=np.int32), 5000, 0.0, 1))
    assert await hub.exchange([], [Query("long", 5000, 4)], budget_s=1.0) == {"long": []}
    assert hub.stats()[0].errors >= 1
    assert drafter.texts == {}
    hub.close("long")
    session = HubSession(hub)
    await until(session.step)
    await hub.stop()


async def test_no_server_does_not_hold_up_the_start():
    hub = DrafterHub([GrpcLink("far", "127.0.0.1:1")], LIMITS)
    await hub.start(timeout_s=30.0)
    assert await HubSession(hub).step(1) == []
    assert not hub.stats()[0].connected
    await hub.stop()


async def test_the_address_is_asked_anew_for_each_connection(serve):
    addresses = ["127.0.0.1:1", await serve(CountingDrafter("far"))]
    asked: list[str] = []

    async def provider() -> str:
        if not asked:
            asked.append("nobody knows")
            raise LookupError("not started yet")
        asked.append(addresses.pop(0) if len(addresses) > 1 else addresses[0])
        return asked[-1]

    hub = DrafterHub([GrpcLink("far", provider)], QUICK_RETRY)
    await hub.start()
    session = HubSession(hub)
    await until(session.step)
    assert len(asked) == 3
    await hub.stop()


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [(torch.AcceleratorError("illegal memory access"), True),
     (torch.OutOfMemoryError("out of memory"), False), (ValueError("a bug"), False)],
)  # fmt: skip
async def test_a_drafter_whose_device_is_lost_ends_its_server(error, is_lost):
    """The error itself costs proposals only."""
    lost: list[bool] = []

    def fail(_query: Query) -> object:
        raise error

    drafter = ScriptedDrafter(fail, name="far")
    server = DrafterServer(drafter, on_device_lost=lambda: lost.append(True))
    hub = DrafterHub([GrpcLink("far", f"127.0.0.1:{await server.start()}")], LIMITS)
    await hub.start()
    assert await HubSession(hub).step(1) == []
    assert bool(lost) == is_lost
    await hub.stop()
    await server.stop()


async def test_what_a_server_reports_again_and_again_is_two_lines_of_the_log(serve, caplog):
    def fail(_query: Query) -> object:
        raise ValueError("what a request said")

    hub = DrafterHub([GrpcLink("far", await serve(ScriptedDrafter(fail, name="far")))], QUICK_RETRY)
    await hub.start()
    session = HubSession(hub)

    async def has_failed_often() -> bool:
        await session.step(1)
        return hub.stats()[0].errors >= 10

    await until(has_failed_often)
    # The server's and the hub's own.
    assert len(caplog.records) == 2
    assert "ValueError in fail at" in caplog.text
    assert "request said" not in caplog.text
    await hub.stop()


@pytest.fixture
def tls_files(tmp_path: Path) -> TlsFiles:
    return self_signed_files(tmp_path)


async def test_mutual_tls_serves_those_with_a_certificate_only(tls_files):
    server = DrafterServer(CountingDrafter("far"), "localhost", tls=tls_files)
    address = f"localhost:{await server.start()}"
    clients = {"mutual": tls_files, "no certificate": TlsFiles(ca=tls_files.ca), "plain": None}
    served = {}
    for name, tls in clients.items():
        hub = DrafterHub([GrpcLink("far", address, GrpcOptions(tls=tls))], LIMITS)
        await hub.start()
        served[name] = bool(await HubSession(hub).step(budget_s=1.0))
        await hub.stop()
    await server.stop()
    assert served == {"mutual": True, "no certificate": False, "plain": False}


def test_missing_tls_files_are_named(tmp_path):
    missing = str(tmp_path / "none.pem")
    with pytest.raises(ConfigError, match=r"tls\.ca: cannot read .*none\.pem"):
        TlsFiles(ca=missing).channel_credentials()
    with pytest.raises(ConfigError, match="both certificate and key"):
        TlsFiles().server_credentials()


async def test_a_taken_port_is_a_config_error(serve):
    port = int((await serve(CountingDrafter())).rpartition(":")[2])
    server = DrafterServer(CountingDrafter(), port=port)
    with pytest.raises(ConfigError, match="cannot listen"):
        await server.start()
    await server.stop()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "config: not JSON"),
        ("[]", "must be a JSON object"),
        ('{"kind": "oracle"}', "unknown drafter 'oracle'"),
        ('{"kind": "prompt_lookup", "max_ngarm": 2}', "did you mean 'max_ngram'"),
    ],
)
def test_wrong_settings_end_with_one_line(config, message, capsys):
    assert main(["--config", config]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


FAR = {"kind": "prompt_lookup", "name": "far", "num_matches": 1}


async def test_kill_9_in_the_middle_stops_proposals_until_the_server_is_back(start_process):
    process, port = await start_process(FAR, 0)
    hub = DrafterHub([GrpcLink("far", f"127.0.0.1:{port}")], QUICK_RETRY)
    await hub.start()
    rhyme = Rhyme(hub)
    await until(rhyme.step)
    for index in range(60):
        if index == 30:
            os.kill(process.pid, signal.SIGKILL)
        await rhyme.step()
    await process.wait()
    await until(rhyme.is_silent)
    for _ in range(20):
        assert await rhyme.step() == 0
    assert not hub.stats()[0].connected
    process, same_port = await start_process(FAR, port)
    assert same_port == port
    await until(rhyme.step)
    # Opened anew with all tokens, and in step again from there on.
    assert [await rhyme.step() for _ in range(5)].count(0) <= 1
    assert hub.stats()[0].reconnects >= 1
    await hub.stop()
    process.terminate()
    out, err = await process.communicate()
    assert (process.returncode, out, err) == (0, b"", b"")


async def test_a_server_that_stops_gives_its_requests_to_the_other_one_first() -> None:
    drafters = [CountingDrafter("far") for _ in range(2)]
    servers = [DrafterServer(drafter) for drafter in drafters]
    links: dict[str, DrafterLink] = {
        str(number): GrpcLink("far", f"127.0.0.1:{await server.start()}")
        for number, server in enumerate(servers)
    }
    hub = DrafterHub([DrafterPool("far", 256, True, links)], LIMITS, budget_s=5.0)
    await hub.start()
    sessions = [HubSession(hub, f"r{number}") for number in range(4)]
    for session in sessions:
        (proposal,) = await session.step(1)
        assert proposal.tokens.tolist() == session.expected(4)
    assert [server.num_open for server in servers] == [2, 2]
    stopping = asyncio.ensure_future(servers[0].stop(60.0))
    while not stopping.done():
        # No step is without drafts.
        for session in sessions:
            (proposal,) = await session.step(1)
            assert proposal.tokens.tolist() == session.expected(4)
        await asyncio.sleep(0.01)
    assert [len(drafter.texts) for drafter in drafters] == [0, 4]
    assert hub.stats()[0].moved == 2
    await hub.stop()
    await servers[1].stop()


async def test_requests_go_to_the_server_with_the_fewest_of_all_engines() -> None:
    drafters = [CountingDrafter("far") for _ in range(2)]
    servers = [DrafterServer(drafter) for drafter in drafters]
    addresses = [f"127.0.0.1:{await server.start()}" for server in servers]
    alone = DrafterHub([GrpcLink("far", addresses[0])], LIMITS, budget_s=5.0)
    links: dict[str, DrafterLink] = {one: GrpcLink("far", one) for one in addresses}
    shared = DrafterHub([DrafterPool("far", 256, True, links)], LIMITS, budget_s=5.0)
    for hub in (alone, shared):
        await hub.start()
    for number in range(4):
        await HubSession(alone, f"r{number}").step(1)
    # One at each: only answers tell what others have there.
    sessions = [HubSession(shared, f"r{number}") for number in range(2)]
    for _ in range(3):
        for session in sessions:
            await session.step(1)
    assert [server.num_open for server in servers] == [5, 1]
    for number in range(2, 5):
        sessions.append(HubSession(shared, f"r{number}"))
        (proposal,) = await sessions[-1].step(1)
        assert proposal.tokens.tolist() == sessions[-1].expected(4)
    assert [server.num_open for server in servers] == [5, 4]
    assert servers[0].read_work().busy > 0
    for hub in (alone, shared):
        await hub.stop()
    for server in servers:
        await server.stop()


async def test_an_answer_to_a_coordinator_that_has_gone_is_no_failure(serve, caplog) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    class WaitingDrafter(CountingDrafter):
        def propose(self, queries: Sequence[Query], deadline: float | None = None) -> Any:
            is_asked.set()
            assert may_answer.wait(60)
            return super().propose(queries, deadline)

    drafter = WaitingDrafter("far")
    hub = DrafterHub([GrpcLink("far", await serve(drafter))], LIMITS)
    await hub.start()
    await HubSession(hub).step(budget_s=0.05)
    await asyncio.to_thread(is_asked.wait, 60)
    await hub.stop()
    # The server hears of it while the drafter works.
    await asyncio.sleep(0.2)
    may_answer.set()

    async def is_forgotten() -> bool:
        return not drafter.texts

    await until(is_forgotten)
    assert "event=raised" not in caplog.text
