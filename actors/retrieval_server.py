"""The gRPC server of a store: `python -m draftline.actors.retrieval_server --store URL`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable

import grpc
from google.protobuf.message import DecodeError

from ..cluster.tls_files import TlsFiles
from ..core.errors import CapacityError, ProtocolError
from ..core.lookup import Lookup
from ..retrieval_store.lookup import load_compiled_lookup
from ..retrieval_store.lookup_queue import LookupQueue
from ..retrieval_store.open_store import open_store
from ..retrieval_store.retrieval_pb2 import LookupRequest
from ..retrieval_store.service import Expected, RetrievalService
from ..retrieval_store.wire import METHOD, REFUSED, decode_request, encode_reply
from .grpc_listener import (
    GrpcListener,
    add_listen_arguments,
    listen_settings,
    run_server,
    serve_until_signal,
)
from .health_check import health_handler

SERVICE, _, METHOD_NAME = METHOD.strip("/").partition("/")


class RetrievalServer:
    """Answers lookups over gRPC at host:port; port 0 lets the system choose one.

    A batch that cannot be answered before its deadline is refused at once. `is_serving` is what
    health probes are told.
    """

    def __init__(
        self,
        lookup: Lookup,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        tls: TlsFiles | None = None,
        is_serving: Callable[[], bool] = lambda: True,
    ) -> None:
        self._queue = LookupQueue(lookup)
        handler = grpc.unary_unary_rpc_method_handler(self._answer)
        methods = grpc.method_handlers_generic_handler(SERVICE, {METHOD_NAME: handler})
        handlers = [methods, health_handler(is_serving)]
        self._listener = GrpcListener(handlers, host, port, tls=tls, grace_s=1.0)

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
        try:
            left = context.time_remaining()
            return encode_reply(await self._queue.lookup(*arguments, time_left=left))
        except CapacityError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{REFUSED}{error}")


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
        server = RetrievalServer(
            service, **listen_settings(given), is_serving=lambda: service.status.is_serving
        )
        # Or the first batches would be late, and lookups be thought to take so long.
        await asyncio.to_thread(load_compiled_lookup)
        # What cannot be loaded at the start is an error; later, the last content is served on.
        await asyncio.to_thread(service.refresh)
        service.start()
        await serve_until_signal(server.start, server.stop)
        await asyncio.to_thread(service.stop)

    return run_server("retrieval_server", serve)


if __name__ == "__main__":
    sys.exit(main())
