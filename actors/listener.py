"""A gRPC server's arguments, port, TLS, tokens, health checks and signals."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

import grpc
import grpc.aio

from ..cluster.links.access import Access, TlsFiles, read_access
from ..cluster.loop_calls import call_on_loop
from ..core.errors import ConfigError, DraftlineError

HEALTH_METHOD = "/grpc.health.v1.Health/Check"
# HealthCheckResponse has one field, `status`, number 1: SERVING is 1, NOT_SERVING is 2.
SERVING = b"\x08\x01"
NOT_SERVING = b"\x08\x02"
# Timeout for the first message of a call without a token, before it is refused.
FIRST_MESSAGE_S = 1.0
REASON = "a bearer token of this server is needed: token_env or token_file in the client's settings"
SERVICE, _, METHOD_NAME = HEALTH_METHOD.strip("/").partition("/")


def add_listen_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the address, the certificates and the tokens."""
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: the system chooses")
    parser.add_argument("--tls-certificate", help="PEM file; with it, connections need TLS")
    parser.add_argument("--tls-key", help="PEM file")
    parser.add_argument("--tls-ca", help="PEM file; with it, clients need a certificate")
    parser.add_argument(
        "--token-env",
        metavar="NAME",
        help="environment variable with tokens, one a line; calls need one of them",
    )
    parser.add_argument("--token-file", metavar="FILE", help="file with such lines")
    parser.add_argument(
        "--allow-unauthenticated",
        action="store_true",
        help="listen on other than loopback without tokens: any client of the port is served",
    )


def listen_settings(given: argparse.Namespace) -> dict[str, Any]:
    """The parsed arguments of `add_listen_arguments` as a server's: host, port, tls, access.

    Raises `ConfigError` for a server that would serve other machines without tokens.
    """
    tls = TlsFiles(ca=given.tls_ca, certificate=given.tls_certificate, key=given.tls_key)
    access = read_access(given.token_env, given.token_file)
    if access is None and not given.allow_unauthenticated and not is_loopback(given.host):
        raise ConfigError(
            "host",
            f"{given.host} is reached from other machines; give --token-file or --token-env, or "
            "--allow-unauthenticated if nobody else can reach it",
        )
    has_tls = tls != TlsFiles()
    return {
        "host": given.host,
        "port": given.port,
        "tls": tls if has_tls else None,
        "access": access,
    }


def is_loopback(host: str) -> bool:
    """Whether a server on this address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class GrpcListener:
    """A gRPC server at host:port; port 0 lets the system choose one.

    access             the allowed callers; None: everyone who can reach the port
    grace_s            seconds that running calls may take when it stops
    max_message_bytes  larger messages are refused, both ways; None: gRPC's own limit
    """

    def __init__(
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
        # Otherwise two servers could share one port, each with half of the connections.
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
        """Refuse new calls, and end calls that outlast the grace period; may be called twice."""
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

    ends_with_stdin  also stop when standard input is closed, since the parent process is gone
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
    # Reads the descriptor: a thread that holds the lock of `sys.stdin` makes the exit fail.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    call_on_loop(loop, stopped.set)


def run_server(name: str, serve: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a server; returns the exit status. A user's error prints one line and gives status 2."""
    logging.basicConfig(level=logging.WARNING)
    try:
        asyncio.run(serve())
    except DraftlineError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 2
    return 0


def health_handler(is_serving: Callable[[], bool]) -> grpc.GenericRpcHandler:
    """Answers for the process as a whole, whatever service a probe asks for."""

    async def check(_request: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        return SERVING if is_serving() else NOT_SERVING

    handler = grpc.unary_unary_rpc_method_handler(check)
    return grpc.method_handlers_generic_handler(SERVICE, {METHOD_NAME: handler})


class TokenCheck(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED before a handler sees the call; health checks need no token."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's own handler, or one that refuses."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method == HEALTH_METHOD:
            return handler
        if self._access.allows(handler_call_details.invocation_metadata):
            return handler
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(
    requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
) -> AsyncIterator[bytes]:
    # Read the request first: a client refused while it still writes reports INTERNAL, not the
    # reason.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_MESSAGE_S):
            await anext(requests, b"")
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, REASON)
    yield b""
