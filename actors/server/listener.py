"""What the gRPC servers of drafters and of stores share: the port, TLS, tokens, signals."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import grpc
import grpc.aio

from ...cluster.links.tls_files import TlsFiles
from ...cluster.links.tokens import Access
from ...cluster.loop_calls import call_on_loop
from ...core.errors import ConfigError, DraftlineError
from .token_check import TokenCheck


class GrpcListener:
    """A gRPC server at host:port; port 0 lets the system choose one.

    access             who may call; None: whoever reaches the port
    grace_s            how long calls under way may go on when it stops, seconds
    max_message_bytes  larger messages are refused, both ways; None: gRPC's own limit
    """

    def __init__(  # noqa: PLR0913 - most are keywords
        self,
        handlers: Sequence[grpc.GenericRpcHandler],
        host: str,
        port: int,
        *,
        tls: TlsFiles | None,
        access: Access | None = None,
        grace_s: float,
        max_message_bytes: int | None = None,
    ) -> None:
        self._handlers = tuple(handlers)
        self._address = f"{host}:{port}"
        self._tls = tls
        self._checks = [] if access is None else [TokenCheck(access)]
        self._grace_s = grace_s
        # Without this, two servers could share one port and each get half of the connections.
        self._options: list[tuple[str, int]] = [("grpc.so_reuseport", 0)]
        if max_message_bytes is not None:
            limits = ("grpc.max_send_message_length", "grpc.max_receive_message_length")
            self._options += [(limit, max_message_bytes) for limit in limits]
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Listen; the port. Raises `ConfigError` if it is taken or TLS files are missing."""
        server = grpc.aio.server(interceptors=self._checks, options=self._options)
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
    start: Callable[[], Awaitable[int]],
    stop: Callable[[], Awaitable[None]],
    *,
    ends_with_stdin: bool = False,
) -> None:
    """Print `ready port=N` when `start` is done; `stop` after SIGTERM or SIGINT.

    ends_with_stdin  also when standard input is closed: the process that held it is gone
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    if ends_with_stdin:
        threading.Thread(target=_wait_for_end, args=(loop, stopped), daemon=True).start()
    port = await start()
    sys.stdout.write(f"ready port={port}\n")
    sys.stdout.flush()
    await stopped.wait()
    await stop()


def _wait_for_end(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    # The descriptor itself: a thread that holds the lock of `sys.stdin` makes the exit fail.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    call_on_loop(loop, stopped.set)


def run_server(name: str, serve: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """The exit status of a server's process: a user's error ends it with one line and status 2."""
    logging.basicConfig(level=logging.WARNING)
    try:
        asyncio.run(serve())
    except DraftlineError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 2
    return 0
