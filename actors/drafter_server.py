"""The gRPC server of one drafter: `python -m draftline.actors.drafter_server --config JSON`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys

import grpc

from ..cluster.config import DrafterConfig, EngineConfig
from ..cluster.drafter_factory import build_drafter
from ..cluster.drafter_service import DrafterService
from ..cluster.tls_files import TlsFiles
from ..cluster.wire import DEFAULT_MAX_BYTES
from ..core.drafter import Drafter
from ..core.errors import ConfigError, DraftlineError


class DrafterServer:
    """Serves a drafter at host:port; port 0 lets the system choose one."""

    def __init__(
        self,
        drafter: Drafter,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        tls: TlsFiles | None = None,
        max_message_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        self._service = DrafterService(drafter, max_message_bytes)
        self._address = f"{host}:{port}"
        self._tls = tls
        self._max_message_bytes = max_message_bytes
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Listen; the port. Raises `ConfigError` if it is taken or TLS files are missing."""
        limits = ("grpc.max_send_message_length", "grpc.max_receive_message_length")
        options = [(limit, self._max_message_bytes) for limit in limits]
        # Without this, two servers could share one port and each get half of the connections.
        server = grpc.aio.server(options=[*options, ("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((self._service.handler(),))
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
        """End every connection."""
        if self._server is not None:
            await self._server.stop(grace=0)
            self._server = None
        self._service.close()


async def serve_until_signal(server: DrafterServer) -> None:
    """Print `ready port=N` when the server listens; return after SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    port = await server.start()
    sys.stdout.write(f"ready port={port}\n")
    sys.stdout.flush()
    await stop.wait()
    await server.stop()


def main(arguments: list[str] | None = None) -> int:
    """Entry point; errors of the user end with one line on stderr and status 2."""
    parser = argparse.ArgumentParser(prog="draftline.actors.drafter_server", description=__doc__)
    parser.add_argument("--config", required=True, help="the drafter's settings as a JSON object")
    parser.add_argument("--target", help="the served model: refuse what was made for another")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: the system chooses")
    parser.add_argument("--tls-certificate", help="PEM file; with it, connections need TLS")
    parser.add_argument("--tls-key", help="PEM file")
    parser.add_argument("--tls-ca", help="PEM file; with it, clients need a certificate")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    tls = TlsFiles(ca=given.tls_ca, certificate=given.tls_certificate, key=given.tls_key)
    try:
        target = EngineConfig.model_validate({"model": given.target}) if given.target else None
        drafter = build_drafter(_parse_config(given.config), target)
        server = DrafterServer(
            drafter, given.host, given.port, tls=tls if given.tls_certificate else None
        )
        asyncio.run(serve_until_signal(server))
    except DraftlineError as error:
        sys.stderr.write(f"drafter_server: {error}\n")
        return 2
    return 0


def _parse_config(text: str) -> DrafterConfig:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError("config", f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("config", "must be a JSON object")
    return DrafterConfig(**values)


if __name__ == "__main__":
    sys.exit(main())
