"""The gRPC server of a store: `python -m draftline.actors.retrieval_server --store URL`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ..cluster.tls_files import TlsFiles
from ..core.errors import ConfigError, DraftlineError, ProtocolError
from ..core.lookup import Lookup
from ..retrieval_store.open_store import open_store
from ..retrieval_store.retrieval_pb2 import LookupRequest
from ..retrieval_store.service import Expected, RetrievalService
from ..retrieval_store.wire import METHOD, decode_request, encode_reply

SERVICE, _, METHOD_NAME = METHOD.strip("/").partition("/")


class RetrievalServer:
    """Answers lookups over gRPC at host:port; port 0 lets the system choose one."""

    def __init__(
        self, lookup: Lookup, host: str = "127.0.0.1", port: int = 0, *, tls: TlsFiles | None = None
    ) -> None:
        self._lookup = lookup
        self._address = f"{host}:{port}"
        self._tls = tls
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Listen; the port. Raises `ConfigError` if it is taken or TLS files are missing."""
        # Without this, two servers could share one port and each get half of the connections.
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handler = grpc.unary_unary_rpc_method_handler(self._answer)
        methods = grpc.method_handlers_generic_handler(SERVICE, {METHOD_NAME: handler})
        server.add_generic_rpc_handlers((methods,))
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
        """Refuse new calls, give those under way a second."""
        if self._server is not None:
            await self._server.stop(grace=1.0)
            self._server = None

    async def _answer(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            arguments = decode_request(LookupRequest.FromString(data))
        except (DecodeError, ProtocolError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        # Some hundred microseconds, so a thread would cost more than it frees.
        return encode_reply(self._lookup.lookup(*arguments))


async def serve_until_signal(server: RetrievalServer, service: RetrievalService) -> None:
    """Write `ready port=N` to stdout once lookups are answered; return after SIGTERM or SIGINT.

    Raises `StoreError` if the store's content cannot be loaded at the start.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await asyncio.to_thread(service.refresh)
    port = await server.start()
    service.start()
    sys.stdout.write(f"ready port={port}\n")
    sys.stdout.flush()
    await stop.wait()
    await server.stop()
    await asyncio.to_thread(service.stop)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; errors of the user end with one line on stderr and status 2."""
    parser = argparse.ArgumentParser(prog="draftline.actors.retrieval_server", description=__doc__)
    parser.add_argument("--store", required=True, help="redis:// URL, or a folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: the system chooses")
    parser.add_argument("--tokenizer-hash", help="refuse segments of another tokenizer")
    parser.add_argument("--model-hash", help="refuse segments refined by another target")
    parser.add_argument("--tls-certificate", help="PEM file; with it, connections need TLS")
    parser.add_argument("--tls-key", help="PEM file")
    parser.add_argument("--tls-ca", help="PEM file; with it, clients need a certificate")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    tls = TlsFiles(ca=given.tls_ca, certificate=given.tls_certificate, key=given.tls_key)
    expected = Expected(tokenizer_hash=given.tokenizer_hash, model_hash=given.model_hash)
    try:
        service = RetrievalService(open_store(given.store), expected)
        server = RetrievalServer(
            service, given.host, given.port, tls=tls if given.tls_certificate else None
        )
        asyncio.run(serve_until_signal(server, service))
    except DraftlineError as error:
        sys.stderr.write(f"retrieval_server: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
