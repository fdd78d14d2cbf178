"""An engine and the client of an API process at both ends of a socket, in one process."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from draftline.deploy.api.http.metrics import ServerMetrics
from draftline.deploy.engine_process.client import SocketEngineClient
from draftline.deploy.engine_process.messages import Hello
from draftline.deploy.engine_process.server import ApiSession, EngineServer


@dataclass(frozen=True, slots=True)
class Split:
    """The engine's server, its one session, and the client."""

    server: EngineServer
    session: ApiSession
    client: SocketEngineClient


@asynccontextmanager
async def split_engine(engine: Any, model: str, **options: Any) -> AsyncIterator[Split]:
    """A connected client of `engine`, which has started; `options` are the client's."""
    server = EngineServer(engine, ServerMetrics("tiny"))
    server.loaded()
    here, there = socket.socketpair()
    here.setblocking(False)
    there.setblocking(False)
    session = await server.connect(here, Hello(engine.max_model_len))
    client = SocketEngineClient(there, model, **options)
    await client.start()
    try:
        yield Split(server, session, client)
    finally:
        await client.close()
        await session.closed
