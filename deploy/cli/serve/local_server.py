"""Serves the API from this process with uvicorn."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import signal
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from ....cluster.loop_calls import spare_collector
from ....core.errors import EngineFailed
from ...api.http.connections import KEEP_ALIVE_TIMEOUT_S, BoundedProtocol, ConnectionPool
from ...api.http.middleware import Drain
from .listening import BACKLOG, listen

logger = logging.getLogger(__name__)

# Time after requests were ended, for sending their errors.
SHUTDOWN_TIMEOUT_S = 3
# Files and sockets besides clients' connections: stages, drafters, logs.
OTHER_FILES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Actions at the first signal; a second one ends the waiting.

    timeout_s  how long running requests may take
    end_rest   ends the requests that take longer, with an error
    on_drain   called with the number of running requests, if any
    failure    done with the reason when the engine fails; then nothing is waited for
    """

    drain: Drain
    timeout_s: float
    end_rest: Callable[[], Awaitable[None]]
    on_drain: Callable[[int], None]
    failure: Future[str] = field(default_factory=Future)


def allow_connections(number: int) -> None:
    """Raise the process's limit on open files if it is too low for `number` connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = number + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        logger.warning("event=few_open_files limit=%d wanted=%d", hard, needed)
        needed = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def server_config(
    app: ASGIApp, pool: ConnectionPool, accepts_at_once: int = BACKLOG
) -> uvicorn.Config:
    """How uvicorn serves `app` to the connections of `pool`.

    accepts_at_once  connections that are accepted in one turn of the loop
    """
    protocol: Any = partial(BoundedProtocol, pool=pool)
    return uvicorn.Config(
        cast("Any", app),
        http=protocol,
        # The limits do not cover upgraded connections; no route upgrades.
        ws="none",
        log_level="error",
        access_log=False,
        lifespan="off",
        # A peer's address is that of its connection, never of a header.
        proxy_headers=False,
        backlog=accepts_at_once,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        timeout_keep_alive=math.ceil(KEEP_ALIVE_TIMEOUT_S),
    )


def serve_local(
    app: FastAPI,
    listener: socket.socket,
    pool: ConnectionPool,
    on_ready: Callable[[], None],
    shutdown: Shutdown,
    *,
    accepts_at_once: int = BACKLOG,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain. `accepts_at_once`: as of `server_config`.

    Raises what the app's start raises; `EngineFailed` if the engine fails.
    """
    allow_connections(pool.max_connections)
    config = server_config(app, pool, accepts_at_once)
    asyncio.run(_serve(app, listener, config, on_ready, shutdown))


class _Server(uvicorn.Server):
    """Leaves signals to `on_signal`; uvicorn itself would stop listening at once."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Called by uvicorn for each signal."""
        self._on_signal()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn to begin to listen."""
        await super().startup(sockets)
        # asyncio has one number for what the system keeps and for what it takes at once.
        for listener in sockets or ():
            listener.listen(BACKLOG)


async def _serve(
    app: FastAPI,
    listener: socket.socket,
    config: uvicorn.Config,
    on_ready: Callable[[], None],
    shutdown: Shutdown,
) -> None:
    loop = asyncio.get_running_loop()

    def begin() -> None:
        # The signal may come after the server has ended.
        if not loop.is_closed():
            loop.call_soon_threadsafe(shutdown.drain.begin)

    server = _Server(config, begin)
    # Also while the model loads and while it is closed, when uvicorn does not listen to signals.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    # Run here and not by uvicorn, which would print the traceback of a failed start.
    async with app.router.lifespan_context(app):
        # From here on connections are kept until uvicorn takes them.
        listen(listener)
        spare_collector()
        on_ready()
        stopping = asyncio.create_task(_stop(server, shutdown))
        await server.serve(sockets=[listener])
        await stopping
        if shutdown.failure.done():
            raise EngineFailed(shutdown.failure.result())


async def _stop(server: uvicorn.Server, shutdown: Shutdown) -> None:
    """Wait for a signal and for the requests that run then; stop the server."""
    drain = shutdown.drain
    begun = asyncio.ensure_future(drain.begun())
    failed = asyncio.wrap_future(shutdown.failure)
    await asyncio.wait([begun, failed], return_when=asyncio.FIRST_COMPLETED)
    try:
        if failed.done():
            # Requests that ran have got their errors.
            begun.cancel()
            drain.begin()
            return
        if drain.num_running:
            shutdown.on_drain(drain.num_running)
        if not await drain.finish(shutdown.timeout_s):
            await shutdown.end_rest()
    finally:
        server.should_exit = True
