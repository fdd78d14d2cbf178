"""The API of a fake engine on a real socket, and clients that speak plain bytes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import uvicorn
from draftline.deploy.api.app import create_app
from draftline.deploy.api.engine_client import LocalEngineClient
from draftline.deploy.api.http.connections import ConnectionPool
from draftline.deploy.cli.serve.listening import bind
from draftline.deploy.cli.serve.local_server import server_config
from draftline.deploy.settings.settings import ServerConfig
from support.fakes.fake_engine import FakeEngine

DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A running server: its address, and the connections that it has."""

    port: int
    pool: ConnectionPool


@asynccontextmanager
async def http_server(engine: FakeEngine, **options: Any) -> AsyncIterator[HttpServer]:
    """The API of `engine` at a free port; `options` are those of `ServerConfig`."""
    config = ServerConfig(host="127.0.0.1", port=0, **options)
    app = create_app(LocalEngineClient(engine), config, "tiny")  # pyright: ignore[reportArgumentType]
    pool = ConnectionPool(config.max_connections, config.max_body_bytes)
    listener = bind(config)
    server = uvicorn.Server(server_config(app, pool))
    async with app.router.lifespan_context(app):
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        try:
            yield HttpServer(listener.getsockname()[1], pool)
        finally:
            server.should_exit = True
            await serving


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds; fails after a deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.01)


class RawClient:
    """A connection that sends what it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """Send bytes; raises `ConnectionError` once the server has ended the connection."""
        self._writer.write(data)
        async with asyncio.timeout(DEADLINE_S):
            await self._writer.drain()

    def end_sending(self) -> None:
        """Close this half of the connection."""
        self._writer.write_eof()

    async def read_until(self, end: bytes) -> bytes:
        """What the server sends, until `end`."""
        async with asyncio.timeout(DEADLINE_S):
            return await self._reader.readuntil(end)

    async def read_last(self, end: bytes) -> bytes:
        """What the server sends, until the last of it ends with `end`."""
        data = bytearray()
        async with asyncio.timeout(DEADLINE_S):
            while not data.endswith(end):
                part = await self._reader.read(65536)
                assert part, bytes(data[-1000:])
                data += part
        return bytes(data)

    async def read_all(self) -> bytes:
        """What the server sends until it ends the connection, in whatever way."""
        parts = []
        async with asyncio.timeout(DEADLINE_S):
            try:
                while part := await self._reader.read(65536):
                    parts.append(part)
            except ConnectionError:
                pass
        return b"".join(parts)

    async def answer(self) -> tuple[int, bytes]:
        """The status and the body of the next answer, which has a length."""
        head = await self.read_until(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length:")
        )
        async with asyncio.timeout(DEADLINE_S):
            return int(head.split()[1]), await self._reader.readexactly(length)

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


@asynccontextmanager
async def raw_client(port: int, *, buffer: int | None = None) -> AsyncIterator[RawClient]:
    """A connection to the server; `buffer` is the size of its receive buffer, bytes."""
    connection = socket.socket()
    connection.setblocking(False)
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    # A small limit: asyncio's own reader stops reading soon, too.
    reader, writer = await asyncio.open_connection(sock=connection, limit=65536)
    client = RawClient(reader, writer)
    try:
        yield client
    finally:
        await client.close()


def post(body: dict[str, Any], **headers: str) -> bytes:
    """A whole request for completions."""
    data = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: a", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


async def is_answering(port: int) -> bool:
    """Whether a new connection finds the server healthy."""
    async with raw_client(port) as client:
        await client.send(HEALTH)
        return (await client.answer())[0] == 200
