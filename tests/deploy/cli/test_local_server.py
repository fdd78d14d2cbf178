"""The socket that the server listens on."""

from __future__ import annotations

import asyncio
import socket

from draftline.deploy.cli.serve.local_server import bind
from draftline.deploy.settings.settings import ServerConfig


async def test_answers_never_wait_for_a_clients_acknowledgement() -> None:
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: socket.socket = writer.get_extra_info("socket")
        accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind(ServerConfig(host="127.0.0.1", port=0))
    async with await asyncio.start_server(serve, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await accepted == 1
        writer.close()
