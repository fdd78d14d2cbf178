"""What connections may take before anything is known of who opened them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress

import pytest
from draftline.deploy.api import app as api_app
from draftline.deploy.api.http import connections
from support.fakes.fake_engine import FakeEngine
from support.servers.http_server import (
    HEALTH,
    RawClient,
    http_server,
    is_answering,
    post,
    raw_client,
    until,
)

pytestmark = pytest.mark.net

START = b"GET /health HTTP/1.1\r\nHost: a\r\n"
MEGABYTE = b"a" * 2**20


@pytest.fixture(autouse=True)
def _short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.2)


async def send_all(client: RawClient, part: bytes, count: int) -> int:
    """How many parts could be sent before the server ended the connection."""
    for number in range(count):
        try:
            await client.send(part)
        except ConnectionError:
            return number
    return count


@pytest.mark.parametrize("part", [MEGABYTE, b"x-a: " + b"b" * 1000 + b"\r\n"], ids=["one", "many"])
async def test_150_megabytes_of_headers_are_refused(part: bytes) -> None:
    count = 150 * 2**20 // len(part)
    async with http_server(FakeEngine()) as server:
        async with raw_client(server.port) as client:
            reading = asyncio.create_task(client.read_all())
            with suppress(ConnectionError):
                await client.send(START + (b"x-long: " if part is MEGABYTE else b""))
            assert await send_all(client, part, count) < count
            assert (await reading).startswith(b"HTTP/1.1 431")
        assert await is_answering(server.port)
        await until(lambda: server.pool.num_open == 0)


async def test_large_headers_in_one_packet_are_refused_as_well() -> None:
    async with http_server(FakeEngine()) as server, raw_client(server.port) as client:
        await client.send(START + b"x-long: " + b"a" * 40_000 + b"\r\n\r\n")
        status, body = await client.answer()
        assert status == 431
        assert b"more than 32768 bytes" in body


async def test_10_000_headers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_HEADER_BYTES", 10**6)
    async with http_server(FakeEngine()) as server:
        for ending in (b"\r\n", b""):
            async with raw_client(server.port) as client:
                await client.send(START + b"a: b\r\n" * 10_000 + ending)
                status, body = await client.answer()
                assert status == 431
                assert b"more than 100 headers" in body


async def test_headers_of_permitted_size_pass() -> None:
    async with http_server(FakeEngine()) as server, raw_client(server.port) as client:
        for _ in range(2):
            await client.send(START + b"a: b\r\n" * 90 + b"c: " + b"d" * 30_000 + b"\r\n\r\n")
            assert (await client.answer())[0] == 200


async def test_headers_that_never_end_are_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.3)
    async with http_server(FakeEngine()) as server:
        async with raw_client(server.port) as client:
            reading = asyncio.create_task(client.read_all())
            await client.send(START)
            with suppress(ConnectionError):
                while not reading.done():
                    await client.send(b"a")
                    await asyncio.sleep(0.01)
            assert (await reading).startswith(b"HTTP/1.1 408")
        await until(lambda: server.pool.num_open == 0)


async def test_a_client_that_sends_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.2)
    async with http_server(FakeEngine()) as server:
        async with raw_client(server.port) as client:
            assert await client.read_all() == b""
        await until(lambda: server.pool.num_open == 0)


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
async def test_an_idle_connection_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEEP_ALIVE_TIMEOUT_S", 0.2)
    async with http_server(FakeEngine()) as server:
        async with raw_client(server.port) as client:
            await client.send(HEALTH)
            assert (await client.answer())[0] == 200
            await client.send(sent)
            assert await client.read_all() == b""
        await until(lambda: server.pool.num_open == 0)


async def test_a_kept_connection_serves_again() -> None:
    async with http_server(FakeEngine()) as server, raw_client(server.port) as client:
        for _ in range(3):
            await client.send(HEALTH)
            assert (await client.answer())[0] == 200
            await client.send(post({"prompt": "a", "max_tokens": 4}))
            assert (await client.answer())[0] == 200


async def test_a_body_that_never_ends_is_refused_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api_app, "BODY_TIMEOUT_S", 0.3)
    async with http_server(FakeEngine()) as server:
        async with raw_client(server.port) as client:
            await client.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
            )
            status, body = await client.answer()
            assert status == 408
            assert b"the body took longer" in body
            assert await client.read_all() == b""
        await until(lambda: server.pool.num_open == 0)


async def test_a_body_announced_as_too_large_is_not_read() -> None:
    async with (
        http_server(FakeEngine(), max_body_bytes=2048) as server,
        raw_client(server.port) as client,
    ):
        await client.send(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2049\r\n\r\n"
        )
        assert (await client.answer())[0] == 413


async def test_a_large_body_finds_its_answer() -> None:
    async with (
        http_server(FakeEngine(), max_body_bytes=10**6) as server,
        raw_client(server.port) as client,
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
        await client.send(head + piece * 20 + b"0\r\n\r\n")
        assert (await client.answer())[0] == 413
        # All of it has come, so the connection is of use.
        await client.send(HEALTH)
        assert (await client.answer())[0] == 200


async def test_no_body_is_read_without_a_key() -> None:
    async with http_server(FakeEngine(), api_keys=("k",), max_body_bytes=10**6) as server:
        async with raw_client(server.port) as client:
            await client.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            assert (await client.answer())[0] == 401
            piece = b"100000\r\n" + MEGABYTE + b"\r\n"
            assert await send_all(client, piece, 200) < 200
        await until(lambda: server.pool.num_open == 0)


async def test_trailers_are_headers() -> None:
    engine = FakeEngine()
    async with http_server(engine) as server:
        async with raw_client(server.port) as client:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            with suppress(ConnectionError):
                await client.send(head + b"2\r\n{}\r\n0\r\nx-long: ")
            reading = asyncio.create_task(client.read_all())
            assert await send_all(client, MEGABYTE, 150) < 150
            assert (await reading).startswith(b"HTTP/1.1 431")
        await until(lambda: server.pool.num_open == 0)
    assert engine.calls == []


async def test_a_long_body_in_small_chunks_is_no_header() -> None:
    async with http_server(FakeEngine()) as server, raw_client(server.port) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        body = b'{"prompt": "a", "max_tokens": 4}' + b" " * 40_000
        pieces = b"".join(b"1\r\n%c\r\n" % char for char in body)
        await client.send(head + pieces + b"0\r\n\r\n")
        assert (await client.answer())[0] == 200


async def test_1000_idle_connections_harm_nobody() -> None:
    async with http_server(FakeEngine(), max_connections=500) as server, AsyncExitStack() as stack:
        for _ in range(1000):
            await stack.enter_async_context(raw_client(server.port))
        assert await is_answering(server.port)
        assert server.pool.num_open <= 500


async def test_the_longest_idle_connection_makes_room() -> None:
    async with (
        http_server(FakeEngine(), max_connections=2) as server,
        raw_client(server.port) as first,
        raw_client(server.port) as second,
    ):
        for client in (second, first):
            await client.send(HEALTH)
            assert (await client.answer())[0] == 200
        assert await is_answering(server.port)
        assert await second.read_all() == b""
        await first.send(HEALTH)
        assert (await first.answer())[0] == 200


async def test_busy_connections_make_no_room() -> None:
    engine = FakeEngine(hold=asyncio.Event())
    async with http_server(engine, max_connections=1) as server:
        async with raw_client(server.port) as busy:
            await busy.send(post({"prompt": "a", "max_tokens": 4}))
            await engine.arrivals.get()
            async with raw_client(server.port) as refused:
                head = await refused.read_until(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503")
                assert b"Retry-After: 1" in head
            assert engine._hold is not None
            engine._hold.set()
            assert (await busy.answer())[0] == 200
        await until(lambda: server.pool.num_open == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_half_closed_connection_ends_its_request(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(hold=asyncio.Event())
    async with http_server(engine) as server:
        async with raw_client(server.port) as client:
            await client.send(post({"prompt": "a", "stream": stream}))
            request = await engine.arrivals.get()
            client.end_sending()
            await until(lambda: engine.cancelled == [request])
        await until(lambda: server.pool.num_open == 0)
    # A client that leaves is no error.
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_client_that_leaves_within_a_body_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with http_server(FakeEngine()) as server:
        async with raw_client(server.port) as client:
            await client.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
            )
            await until(lambda: server.pool.num_open == 1)
        await until(lambda: server.pool.num_open == 0)
        assert await is_answering(server.port)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_request_ends_with_its_connection_though_another_waits_behind_it() -> None:
    engine = FakeEngine(hold=asyncio.Event())
    async with http_server(engine) as server:
        async with raw_client(server.port) as client:
            await client.send(post({"prompt": "a"}) + HEALTH)
            request = await engine.arrivals.get()
        await until(lambda: engine.cancelled == [request])
        await until(lambda: server.pool.num_open == 0)


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with http_server(FakeEngine()) as server, raw_client(server.port) as client:
        await client.send((post({"prompt": "a", "max_tokens": 2}) + HEALTH) * 4)
        for _ in range(4):
            assert b"text_completion" in (await client.answer())[1]
            assert b"ok" in (await client.answer())[1]


async def test_requests_do_not_pile_up_behind_one_that_runs() -> None:
    engine = FakeEngine(hold=asyncio.Event())
    async with http_server(engine) as server, raw_client(server.port) as client:
        await client.send(post({"prompt": "a"}))
        request = await engine.arrivals.get()
        with suppress(ConnectionError):
            await client.send(HEALTH * 1000)
        await until(lambda: engine.cancelled == [request])
        assert await client.read_all() == b""
        await until(lambda: server.pool.num_open == 0)


@pytest.mark.parametrize(
    "garbage",
    [b"\0" * 100, b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00" * 9],
    ids=["zeros", "short", "tls"],
)
async def test_what_is_no_http_gets_an_error_in_our_shape(garbage: bytes) -> None:
    async with http_server(FakeEngine()) as server:
        async with raw_client(server.port) as client:
            await client.send(garbage)
            status, body = await client.answer()
            assert status == 400
            assert b'"type":"BadRequestError"' in body
            assert await client.read_all() == b""
        assert await is_answering(server.port)


@pytest.mark.parametrize(
    "line",
    [
        b"CONNECT a:80 HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
        b"GET http://a/health HTTP/1.1",
        b"GET /\xff\xfe HTTP/1.1",
        b"GET /%ff%00 HTTP/1.1",
        b"GET / HTTP/9.9",
        b"PRI * HTTP/2.0",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999999999999999",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: x",
    ],
)
async def test_odd_requests_get_an_answer(
    line: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_app, "BODY_TIMEOUT_S", 0.2)
    async with http_server(FakeEngine()) as server:
        async with raw_client(server.port) as client:
            await client.send(line + b"\r\nHost: a\r\n\r\n")
            assert (await client.answer())[0] in {200, 400, 404, 405, 408}
        assert await is_answering(server.port)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_no_connection_is_upgraded_beyond_the_limits() -> None:
    async with http_server(FakeEngine()) as server, raw_client(server.port) as client:
        upgrade = b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        await client.send(START + upgrade + b"Sec-WebSocket-Key: eA==\r\n\r\n")
        assert (await client.answer())[0] == 200


async def test_a_client_that_does_not_read_is_cancelled_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "WRITE_TIMEOUT_S", 0.5)
    engine = FakeEngine(answer="abcd" * 8000)
    engine.max_model_len = 10**6
    body = {"prompt": "a", "max_tokens": 32_000, "stream": True}
    async with http_server(engine) as server:
        async with raw_client(server.port, buffer=4096) as silent:
            await silent.send(post(body))
            request = await engine.arrivals.get()
            async with raw_client(server.port) as other:
                await other.send(post(body))
                whole = await other.read_last(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            await until(lambda: engine.cancelled == [request])
        assert whole.count(b'"text":"ab"') == whole.count(b'"text":"cd"') == 8000
        assert engine.stats().num_running == 0
        await until(lambda: server.pool.num_open == 0)
