"""The socket of a server, bound before anything is loaded."""

from __future__ import annotations

import random
import socket

from ....core.errors import ConfigError
from ...settings.settings import ServerConfig

# Send buffer of a connection; the system's default grows to megabytes for a slow reader.
SEND_BUFFER_BYTES = 256 * 1024
# Connections that wait to be accepted.
BACKLOG = 2048
# Ports that nobody gets unasked: below the system's own, and above those of Ray's workers.
UNASKED_FOR = range(20_000, 32_768)
TRIES = 20


def bind(config: ServerConfig) -> socket.socket:
    """A bound socket, which does not listen yet (`listen`); port 0 gets one from the system.

    Raises `ConfigError` if the address cannot be bound.
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
        # Connections of a server that has just ended do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit this.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        # Two sockets that both have it on, and do not listen yet, get the same address: one of two
        # servers that load at the same time would fail only when the other is ready.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        raise ConfigError(
            "server.port", f"cannot listen on {config.host}:{config.port}: {error.strerror}"
        ) from error
    return listener


def listen(listener: socket.socket) -> None:
    """Start to queue connections until they are accepted."""
    # Connections inherit this, so the next server can bind before they are gone.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.listen(BACKLOG)


def free_port(config: ServerConfig) -> int:
    """The configured port if it is free; for 0, one that nobody else gets before it is bound again.

    Raises `ConfigError` if the address cannot be bound.
    """
    ports = [config.port] if config.port else random.sample(UNASKED_FOR, TRIES)
    for place, port in enumerate(ports, 1):
        try:
            with bind(config.model_copy(update={"port": port})) as listener:
                return listener.getsockname()[1]
        except ConfigError:
            if place == len(ports):
                raise
    raise AssertionError("there is at least one port")
