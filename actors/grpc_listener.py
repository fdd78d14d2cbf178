"""What the gRPC servers of drafters and of stores share: the port, TLS, signals, arguments."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import grpc
import grpc.aio

from ..cluster.tls_files import TlsFiles
from ..core.errors import ConfigError, DraftlineError


class GrpcListener:
    """A gRPC server at host:port; port 0 lets the system choose one.

    grace_s            how long calls under way may go on when it stops, seconds
    max_message_bytes  larger messages are refused, both ways; None: gRPC's own limit
    """

    def __init__(
        self,
        handlers: Sequence[grpc.GenericRpcHandler],
        host: str,
        port: int,
        *,
        tls: TlsFiles | None,
        grace_s: float,
        max_message_bytes: int | None = None,
    ) -> None:
        self._handlers = tuple(handlers)
        self._address = f"{host}:{port}"
        self._tls = tls
        self._grace_s = grace_s
        # Without this, two servers could share one port and each get half of the connections.
        self._options: list[tuple[str, int]] = [("grpc.so_reuseport", 0)]
        if max_message_bytes is not None:
            limits = ("grpc.max_send_message_length", "grpc.max_receive_message_length")
            self._options += [(limit, max_message_bytes) for limit in limits]
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Listen; the port. Raises `ConfigError` if it is taken or TLS files are missing."""
        server = grpc.aio.server(options=self._options)
        server.add_generic_rpc_handlers(self._handlers)
        try:
            if self._tls is None:
                port = server.add_insecure_port(self._address)
            else:
                port = server.add_secure_port(self._address, self._tls.server_credentials())
        except RuntimeError as error:
            raise ConfigError("port", f"cannot listen at {self._address}") from error
        await server.start()
        self._server = server
        return port

    async def stop(self) -> None:
        """Refuse new calls, end those that outlast the grace; twice is once."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(self._grace_s)


async def serve_until_signal(
    start: Callable[[], Awaitable[int]], stop: Callable[[], Awaitable[None]]
) -> None:
    """Print `ready port=N` when `start` is done; `stop` after SIGTERM or SIGINT."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    port = await start()
    sys.stdout.write(f"ready port={port}\n")
    sys.stdout.flush()
    await stopped.wait()
    await stop()


def add_listen_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to listen and with which certificates."""
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: the system chooses")
    parser.add_argument("--tls-certificate", help="PEM file; with it, connections need TLS")
    parser.add_argument("--tls-key", help="PEM file")
    parser.add_argument("--tls-ca", help="PEM file; with it, clients need a certificate")


def listen_settings(given: argparse.Namespace) -> dict[str, Any]:
    """The parsed arguments of `add_listen_arguments` as a server's: host, port, tls."""
    tls = TlsFiles(ca=given.tls_ca, certificate=given.tls_certificate, key=given.tls_key)
    has_tls = tls != TlsFiles()
    return {"host": given.host, "port": given.port, "tls": tls if has_tls else None}


def run_server(name: str, serve: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """The exit status of a server's process: a user's error ends it with one line and status 2."""
    logging.basicConfig(level=logging.WARNING)
    try:
        asyncio.run(serve())
    except DraftlineError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 2
    return 0
