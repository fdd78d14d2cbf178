"""Serves the API from this process with uvicorn."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from ..core.errors import ConfigError
from .settings import ServerConfig

# Running streams get so long to end after the first signal.
SHUTDOWN_TIMEOUT_S = 3


def bind(config: ServerConfig) -> socket.socket:
    """A bound socket; port 0 gets one from the system.

    Raises `ConfigError` if the address cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
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


def serve_local(app: FastAPI, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM. Raises what the app's start raises."""
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )
    server = uvicorn.Server(config)
    # uvicorn raises the signal once more after it has stopped; by then all is done.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: None)
    asyncio.run(_serve(app, server, listener, on_ready))


async def _serve(
    app: FastAPI, server: uvicorn.Server, listener: socket.socket, on_ready: Callable[[], None]
) -> None:
    # Run here and not by uvicorn, which would print the traceback of a failed start.
    async with app.router.lifespan_context(app):
        # From here on connections are kept until uvicorn takes them.
        listener.listen()
        on_ready()
        await server.serve(sockets=[listener])
