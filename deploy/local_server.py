"""Serves the API from this process with uvicorn."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ..core.errors import ConfigError
from .drain import Drain
from .settings import ServerConfig

# What is left when requests were ended, such as sending their errors, gets so long.
SHUTDOWN_TIMEOUT_S = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """What happens at the first signal; a second one ends the waiting.

    timeout_s  how long running requests may take
    end_rest   ends those that take longer, with an error
    on_drain   told how many requests are waited for, if any
    """

    drain: Drain
    timeout_s: float
    end_rest: Callable[[], Awaitable[None]]
    on_drain: Callable[[int], None]


def bind(config: ServerConfig) -> socket.socket:
    """A bound socket; port 0 gets one from the system.

    Raises `ConfigError` if the address cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # asyncio turns Nagle's algorithm off only for sockets that name their protocol; with it,
        # every answer waits for the client's delayed acknowledgement of the headers, 40 ms.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except socket.gaierror as error:
        raise ConfigError("server.host", f"{config.host!r}: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            "server.port", f"cannot listen on {config.host}:{config.port}: {error.strerror}"
        ) from error
    return listener


def free_port(config: ServerConfig) -> int:
    """The configured port if it can be had, or one of the system's choice for 0."""
    with bind(config) as listener:
        return listener.getsockname()[1]


def serve_local(
    app: FastAPI, listener: socket.socket, on_ready: Callable[[], None], shutdown: Shutdown
) -> None:
    """Serve until SIGINT or SIGTERM, then drain. Raises what the app's start raises."""
    asyncio.run(_serve(app, listener, on_ready, shutdown))


class _Server(uvicorn.Server):
    """Leaves signals to `on_signal`; uvicorn itself would stop listening at once."""

    def __init__(self, app: FastAPI, on_signal: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        )
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Called by uvicorn for each signal."""
        self._on_signal()


async def _serve(
    app: FastAPI, listener: socket.socket, on_ready: Callable[[], None], shutdown: Shutdown
) -> None:
    loop = asyncio.get_running_loop()

    def begin() -> None:
        # The process may be past its last word.
        if not loop.is_closed():
            loop.call_soon_threadsafe(shutdown.drain.begin)

    server = _Server(app, begin)
    # Also while the model loads and while it is closed, when uvicorn does not listen to signals.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    # Run here and not by uvicorn, which would print the traceback of a failed start.
    async with app.router.lifespan_context(app):
        # From here on connections are kept until uvicorn takes them.
        listener.listen()
        on_ready()
        stopping = asyncio.create_task(_stop(server, shutdown))
        await server.serve(sockets=[listener])
        await stopping


async def _stop(server: uvicorn.Server, shutdown: Shutdown) -> None:
    """Wait for a signal and for the requests that run then; stop the server."""
    drain = shutdown.drain
    await drain.begun()
    try:
        if drain.num_running:
            shutdown.on_drain(drain.num_running)
        if not await drain.finish(shutdown.timeout_s):
            await shutdown.end_rest()
    finally:
        server.should_exit = True
