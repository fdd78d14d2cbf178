"""A retrieval service behind gRPC: `python -m draftline.actors.retrieval_server --store URL`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ..core.errors import DraftlineError, ProtocolError
from ..core.lookup import Lookup
from ..retrieval_store.open_store import open_store
from ..retrieval_store.retrieval_pb2 import LookupRequest
from ..retrieval_store.service import Expected, RetrievalService
from ..retrieval_store.wire import METHOD, decode_request, encode_reply

SERVICE, _, METHOD_NAME = METHOD.strip("/").partition("/")


class RetrievalServer:
    """Answers lookups over gRPC on the running event loop."""

    def __init__(self, lookup: Lookup, address: str = "127.0.0.1:0") -> None:
        self._lookup = lookup
        self._server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(self._answer)
        methods = grpc.method_handlers_generic_handler(SERVICE, {METHOD_NAME: handler})
        self._server.add_generic_rpc_handlers((methods,))
        self.port = self._server.add_insecure_port(address)

    async def start(self) -> None:
        """Begin to answer on `port`."""
        await self._server.start()

    async def stop(self) -> None:
        """Refuse new calls, give those under way a second."""
        await self._server.stop(grace=1.0)

    async def _answer(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            arguments = decode_request(LookupRequest.FromString(data))
        except (DecodeError, ProtocolError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        # Some hundred microseconds, so a thread would cost more than it frees.
        return encode_reply(self._lookup.lookup(*arguments))


async def serve(service: RetrievalService, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT; write `ready port=N` to stdout once calls are answered.

    Raises `StoreError` if the store's content cannot be loaded at the start.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await asyncio.to_thread(service.refresh)
    service.start()
    server = RetrievalServer(service, f"{host}:{port}")
    await server.start()
    sys.stdout.write(f"ready port={server.port}\n")
    sys.stdout.flush()
    await stopped.wait()
    await server.stop()
    await asyncio.to_thread(service.stop)


def main() -> int:
    """Read the command line and serve; the exit code."""
    parser = argparse.ArgumentParser(prog="draftline.actors.retrieval_server")
    parser.add_argument("--store", required=True, help="redis:// URL, or a folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: the system chooses")
    parser.add_argument("--tokenizer-hash", help="refuse segments of another tokenizer")
    parser.add_argument("--model-hash", help="refuse segments refined by another target")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    expected = Expected(tokenizer_hash=options.tokenizer_hash, model_hash=options.model_hash)
    try:
        service = RetrievalService(open_store(options.store), expected)
        asyncio.run(serve(service, options.host, options.port))
    except DraftlineError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
