"""The gRPC server of a store: `python -m draftline.actors.retrieval_server --store URL`."""

from __future__ import annotations

import argparse
import asyncio
import sys

import grpc
from google.protobuf.message import DecodeError

from ..cluster.tls_files import TlsFiles
from ..core.errors import ProtocolError
from ..core.lookup import Lookup
from ..retrieval_store.open_store import open_store
from ..retrieval_store.retrieval_pb2 import LookupRequest
from ..retrieval_store.service import Expected, RetrievalService
from ..retrieval_store.wire import METHOD, decode_request, encode_reply
from .grpc_listener import (
    GrpcListener,
    add_listen_arguments,
    listen_settings,
    run_server,
    serve_until_signal,
)

SERVICE, _, METHOD_NAME = METHOD.strip("/").partition("/")


class RetrievalServer:
    """Answers lookups over gRPC at host:port; port 0 lets the system choose one."""

    def __init__(
        self, lookup: Lookup, host: str = "127.0.0.1", port: int = 0, *, tls: TlsFiles | None = None
    ) -> None:
        self._lookup = lookup
        handler = grpc.unary_unary_rpc_method_handler(self._answer)
        methods = grpc.method_handlers_generic_handler(SERVICE, {METHOD_NAME: handler})
        self._listener = GrpcListener(methods, host, port, tls=tls, grace_s=1.0)

    async def start(self) -> int:
        """Listen; the port. Raises `ConfigError` if it is taken or TLS files are missing."""
        return await self._listener.start()

    async def stop(self) -> None:
        """Refuse new calls, give those under way a second."""
        await self._listener.stop()

    async def _answer(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            arguments = decode_request(LookupRequest.FromString(data))
        except (DecodeError, ProtocolError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        # Some hundred microseconds, so a thread would cost more than it frees.
        return encode_reply(self._lookup.lookup(*arguments))


def main(arguments: list[str] | None = None) -> int:
    """Entry point; errors of the user end with one line on stderr and status 2."""
    parser = argparse.ArgumentParser(prog="draftline.actors.retrieval_server", description=__doc__)
    parser.add_argument("--store", required=True, help="redis:// URL, or a folder")
    parser.add_argument("--tokenizer-hash", help="refuse segments of another tokenizer")
    parser.add_argument("--model-hash", help="refuse segments refined by another target")
    add_listen_arguments(parser)
    given = parser.parse_args(arguments)

    async def serve() -> None:
        expected = Expected(tokenizer_hash=given.tokenizer_hash, model_hash=given.model_hash)
        service = RetrievalService(open_store(given.store, must_exist=True), expected)
        server = RetrievalServer(service, **listen_settings(given))
        # What cannot be loaded at the start is an error; later, the last content is served on.
        await asyncio.to_thread(service.refresh)
        service.start()
        await serve_until_signal(server.start, server.stop)
        await asyncio.to_thread(service.stop)

    return run_server("retrieval_server", serve)


if __name__ == "__main__":
    sys.exit(main())
