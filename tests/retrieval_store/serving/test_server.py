from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import numpy as np
import pytest
from draftline.actors import retrieval_server
from draftline.actors.retrieval_server import RetrievalServer
from draftline.cluster.links.access import TlsFiles
from draftline.cluster.retrieval import GrpcLookup, ReplicatedLookup
from draftline.core.errors import CapacityError, ConfigError, DrafterError, ProtocolError
from draftline.retrieval_store.directory_store.store import DirectoryStore
from draftline.retrieval_store.search.lookup import SegmentLookup
from draftline.retrieval_store.search.lookup_queue import LookupQueue
from draftline.retrieval_store.wire import (
    MAX_NODES,
    METHOD,
    ContextMessage,
    LearnMessage,
    SubtreeMessage,
    decode_counts,
    decode_learn,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from support.inputs.segments import context, make_segment
from support.servers.self_signed import self_signed_files

pytestmark = pytest.mark.net

LOOKUP = SegmentLookup(
    {"shared": [make_segment([[1, 2, 3, 4], [1, 2, 5]])], "own": [make_segment([[2, 3, 9]])]}
)
ARGUMENTS = ([context(1, 2), context(2, 3), context(8, 8)], ["shared", "own", "own"], [8, 8, 8])


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = RetrievalServer(LOOKUP)
    yield f"127.0.0.1:{await server.start()}"
    await server.stop()


async def test_the_client_answers_as_the_lookup_does(address: str) -> None:
    client = GrpcLookup(address, timeout_s=30)
    found = await asyncio.to_thread(client.lookup, *ARGUMENTS)
    for near, far in zip(LOOKUP.lookup(*ARGUMENTS), found, strict=True):
        assert near.match_len == far.match_len
        for name in ("tokens", "parents", "log_probs"):
            assert np.array_equal(getattr(near, name), getattr(far, name))
            assert getattr(near, name).dtype == getattr(far, name).dtype
    client.close()


async def test_bad_requests_are_refused_and_the_server_goes_on(address: str) -> None:
    requests = [b"\xff", msgspec.msgpack.encode([ContextMessage(b"abc", "", 0)])]
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(METHOD)
        for request in requests:
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await call(request, timeout=30)
            assert info.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        reply = await call(encode_request(*ARGUMENTS), timeout=30)
    assert len(decode_reply(reply, 3)) == 3


async def test_mutual_tls_serves_those_with_a_certificate_only(tmp_path: Path) -> None:
    files = self_signed_files(tmp_path)
    server = RetrievalServer(LOOKUP, "localhost", tls=files)
    address = f"localhost:{await server.start()}"
    client = GrpcLookup(address, timeout_s=30, tls=files)
    assert len(await asyncio.to_thread(client.lookup, *ARGUMENTS)) == 3
    client.close()
    for tls in (TlsFiles(ca=files.ca), None):
        client = GrpcLookup(address, timeout_s=30, tls=tls)
        with pytest.raises(DrafterError, match="UNAVAILABLE"):
            await asyncio.to_thread(client.lookup, *ARGUMENTS)
        client.close()
    await server.stop()


class SlowLookup:
    """Takes 1000 s of its own clock for its first batch, so that later ones are thought to."""

    now = 0.0

    def lookup(self, *arguments: Any) -> list[Any]:
        self.now = 1000.0
        return LOOKUP.lookup(*arguments)

    def clock(self) -> float:
        return self.now


async def test_a_batch_that_would_be_late_is_refused_and_nothing_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookup = SlowLookup()
    queue = partial(LookupQueue, clock=lookup.clock)
    monkeypatch.setattr(retrieval_server, "LookupQueue", queue)
    server = RetrievalServer(lookup)
    client = GrpcLookup(f"127.0.0.1:{await server.start()}", timeout_s=3600)
    replicas = ReplicatedLookup([client], timeout_s=30)
    assert len(await asyncio.to_thread(client.lookup, *ARGUMENTS)) == 3
    with pytest.raises(CapacityError, match="RESOURCE_EXHAUSTED refused: too late"):
        await asyncio.to_thread(client.lookup, *ARGUMENTS, timeout_s=30)
    found = await asyncio.to_thread(replicas.lookup, *ARGUMENTS)
    assert [len(subtree.tokens) for subtree in found] == [0, 0, 0]
    assert len(await asyncio.to_thread(client.lookup, *ARGUMENTS)) == 3
    replicas.close()
    await server.stop()


async def test_health_probes_are_answered() -> None:
    is_well = False
    server = RetrievalServer(LOOKUP, is_serving=lambda: is_well)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"", timeout=30) == b"\x08\x02"
        is_well = True
        assert await check(b"\x0a\x05any-1", timeout=30) == b"\x08\x01"
    await server.stop()


async def test_a_taken_port_is_refused(address: str) -> None:
    port = int(address.rpartition(":")[2])
    with pytest.raises(ConfigError, match="port: cannot listen at"):
        await RetrievalServer(LOOKUP, port=port).start()


def test_a_server_out_of_reach_is_a_drafter_error() -> None:
    client = GrpcLookup("127.0.0.1:1", timeout_s=30)
    with pytest.raises(DrafterError, match=r"127\.0\.0\.1:1: UNAVAILABLE"):
        client.lookup(*ARGUMENTS)
    client.close()


async def test_a_server_that_is_late_is_a_drafter_error() -> None:
    """The handler never answers: what counts is the deadline, whatever its length."""

    async def never(_request: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        await asyncio.Event().wait()
        return b""

    server = grpc.aio.server()
    service, _, method = METHOD.strip("/").partition("/")
    handler = grpc.unary_unary_rpc_method_handler(never)
    handlers = grpc.method_handlers_generic_handler(service, {method: handler})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = GrpcLookup(f"127.0.0.1:{port}", timeout_s=0.05)
    with pytest.raises(DrafterError, match="DEADLINE_EXCEEDED"):
        await asyncio.to_thread(client.lookup, *ARGUMENTS)
    client.close()
    await server.stop(grace=0)


def test_the_process_serves_a_store_and_says_one_line(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("shared", make_segment([[1, 2, 3]]))
    with started(tmp_path, "--tokenizer-hash", "tokenizer") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready port=")
        client = GrpcLookup(f"127.0.0.1:{line.removeprefix('ready port=').strip()}", timeout_s=30)
        assert client.lookup([context(1, 2)], ["shared"], [4])[0].tokens.tolist() == [3]
        client.close()
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest, errors) == (0, "", "")


def test_the_process_refuses_a_store_of_another_tokenizer(tmp_path: Path) -> None:
    DirectoryStore(tmp_path).put("shared", make_segment([[1, 2, 3]]))
    with started(tmp_path, "--tokenizer-hash", "other") as process:
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert "tokenizer_hash is tokenizer, the served model has other" in errors
    assert "Traceback" not in errors


def started(store: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "draftline.actors.retrieval_server", "--store", store, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=store,
    )


@pytest.mark.parametrize(
    "entry",
    [
        ContextMessage(b"abc", "", 0),
        ContextMessage(b"\xff\xff\xff\xff", "", 0),
        ContextMessage(bytes(4 * 5000), "", 0),
        ContextMessage(b"", "", MAX_NODES + 1),
        ContextMessage(b"", "", -1),
    ],
)
def test_bad_requests(entry: ContextMessage) -> None:
    with pytest.raises(ProtocolError):
        decode_request(msgspec.msgpack.encode([entry]))


@pytest.mark.parametrize(
    ("tokens", "parents", "log_probs"),
    [
        ([1, 2], [-1], [0, 0]),
        ([1, 2], [-1, 1], [0, 0]),
        ([1, 2], [-2, 0], [0, 0]),
        ([1, -2], [-1, 0], [0, 0]),
        ([1, 2], [-1, 0], [0, 0.5]),
        ([1, 2], [-1, 0], [0, np.nan]),
    ],
)
def test_bad_replies(tokens: list[int], parents: list[int], log_probs: list[float]) -> None:
    entry = SubtreeMessage(
        np.array(tokens, dtype="<i4").tobytes(),
        np.array(parents, dtype="<i4").tobytes(),
        np.array(log_probs, dtype="<f4").tobytes(),
        0,
    )
    with pytest.raises(ProtocolError):
        decode_reply(msgspec.msgpack.encode([entry]), 1)


@pytest.mark.parametrize("part", [b"\x80", b"\x90", b"\x91", b"\x01"])
def test_what_is_no_message_takes_no_memory(part: bytes) -> None:
    count = 4 * 2**20
    parts = msgspec.Raw(b"\xdd" + count.to_bytes(4, "big") + part * count + b"\x90")
    lookup, learn = ContextMessage(b"", "", 0), LearnMessage("n", b"", b"", "", "", 9)
    subtree = SubtreeMessage(b"", b"", b"", 0)
    readers = (
        (decode_request, parts), (decode_request, [(parts, *lookup[1:])]),
        (lambda data: decode_reply(data, 1), [(parts, *subtree[1:])]),
        (decode_learn, (*learn[:2], parts, *learn[3:])), (decode_counts, {"learned": parts}),
    )  # fmt: skip
    for read, message in readers:
        data = msgspec.msgpack.encode(message)
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError):
                read(data)
            assert tracemalloc.get_traced_memory()[1] < count
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("length", [-1, 2**32])
def test_a_match_that_cannot_be_is_refused(length: int) -> None:
    reply = msgspec.msgpack.encode([SubtreeMessage(b"", b"", b"", length)])
    with pytest.raises(ProtocolError, match=f"match_len: {length}"):
        decode_reply(reply, 1)


def test_replies_of_another_number_are_refused() -> None:
    reply = encode_reply(LOOKUP.lookup(*ARGUMENTS))
    assert len(decode_reply(reply, 3)) == 3
    with pytest.raises(ProtocolError, match="asked for 2 subtrees, got 3"):
        decode_reply(reply, 2)
    half = SubtreeMessage(b"abc", b"abc", b"abc", 0)
    with pytest.raises(ProtocolError, match="tokens: 3 bytes are not a whole"):
        decode_reply(msgspec.msgpack.encode([half]), 1)


def test_budgets_out_of_range_are_clamped() -> None:
    request = encode_request([context(1)] * 2, ["n"] * 2, [-1, 10**12])
    assert decode_request(request)[2] == [0, MAX_NODES]
