"""The gRPC server of a store: `python -m draftline.actors.retrieval_server --store URL`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Collection, Mapping
from typing import NoReturn

import grpc

from ..cluster.links.access import Access, Scope, TlsFiles
from ..cluster.removed_settings import REMOVED_FLAGS
from ..cluster.retrieval import DENIED_KEY
from ..core.errors import CapacityError, ConfigError, ProtocolError, StoreError
from ..core.interfaces import Ended, Lookup
from ..retrieval_store.delta.settings import Fingerprint
from ..retrieval_store.search.lookup import load_compiled_lookup
from ..retrieval_store.search.lookup_queue import LookupQueue
from ..retrieval_store.serving.open_store import open_learning, open_store
from ..retrieval_store.serving.service import Expected, RetrievalService
from ..retrieval_store.store import NAMESPACE
from ..retrieval_store.wire import (
    LEARN_METHOD,
    METHOD,
    REFUSED,
    decode_learn,
    decode_request,
    encode_counts,
    encode_reply,
)
from .listener import (
    GrpcListener,
    add_listen_arguments,
    health_handler,
    listen_settings,
    run_server,
    serve_until_signal,
)

SERVICE, _, METHOD_NAME = METHOD.strip("/").partition("/")
LEARN_METHOD_NAME = LEARN_METHOD.rpartition("/")[2]

# Namespaces named in one refusal; a header is bounded.
MAX_DENIED = 64

Learn = Callable[[Ended, Fingerprint], Mapping[str, int]]


class RetrievalServer:
    """Answers lookups over gRPC at host:port; port 0 lets the system choose one.

    A batch that cannot be answered before its deadline is refused at once. Health probes return
    `is_serving`.

    access  the allowed callers and their namespaces; None: all callers, all namespaces
    learn   takes ended requests, in a thread, and returns their outcomes; None refuses them
    """

    def __init__(
        self,
        lookup: Lookup,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        tls: TlsFiles | None = None,
        access: Access | None = None,
        is_serving: Callable[[], bool] = lambda: True,
        learn: Learn | None = None,
    ) -> None:
        self._queue = LookupQueue(lookup)
        self._access = access
        methods = {METHOD_NAME: grpc.unary_unary_rpc_method_handler(self._answer)}
        if learn is not None:
            self._learn_one = learn
            methods[LEARN_METHOD_NAME] = grpc.unary_unary_rpc_method_handler(self._learn)
        service = grpc.method_handlers_generic_handler(SERVICE, methods)
        handlers = [service, health_handler(is_serving)]
        self._listener = GrpcListener(handlers, host, port, tls=tls, access=access, grace_s=1.0)

    async def start(self) -> int:
        """Listen; the port. Raises `ConfigError` if it is taken or TLS files are missing."""
        return await self._listener.start()

    async def stop(self) -> None:
        """Refuse new calls; running calls have one second to end."""
        await self._listener.stop()

    async def _answer(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            arguments = decode_request(data)
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        scope = self._scope(context)
        await _refuse_unless(context, {name for name in arguments[1] if not scope.may_read(name)})
        try:
            left = context.time_remaining()
            return encode_reply(await self._queue.lookup(*arguments, time_left=left))
        except CapacityError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{REFUSED}{error}")

    async def _learn(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            ended, fingerprint = decode_learn(data)
            if not self._scope(context).may_write(ended.namespace):
                await _refuse_unless(context, {ended.namespace})
            counts = await asyncio.to_thread(self._learn_one, ended, fingerprint)
        except (ProtocolError, ConfigError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return encode_counts(counts)

    def _scope(self, context: grpc.aio.ServicerContext) -> Scope:
        if self._access is None:
            return Scope()
        scope = self._access.scope(context.invocation_metadata())
        assert scope is not None, "the listener lets only tokens of this server through"
        return scope


async def _refuse_unless(context: grpc.aio.ServicerContext, denied: Collection[str]) -> None:
    """Abort with PERMISSION_DENIED, naming the namespaces, unless there are none."""
    if not denied:
        return
    # The others are invalid names and may contain anything.
    names = sorted(filter(NAMESPACE.fullmatch, denied))[:MAX_DENIED]
    await context.abort(
        grpc.StatusCode.PERMISSION_DENIED,
        f"this token is not for the namespace {', '.join(names[:3]) or 'asked for'}; list it "
        "beside the token in the server's --token-file",
        ((DENIED_KEY, ",".join(names)),),
    )


def main(arguments: list[str] | None = None) -> int:
    """Entry point; errors of the user end with one line on stderr and status 2."""
    parser = argparse.ArgumentParser(prog="draftline.actors.retrieval_server", description=__doc__)
    parser.add_argument(
        "--store",
        required=True,
        help="a folder, or a URL: redis://HOST/0?password_file=FILE keeps the password out of the "
        "list of processes",
    )
    parser.add_argument("--store-env", type=_removed_store_env, help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer-hash", help="refuse segments of another tokenizer")
    parser.add_argument("--model-hash", help="refuse segments refined by another target")
    parser.add_argument("--learn-for", metavar="MODEL", help="learn ended requests of this model")
    parser.add_argument(
        "--learn-off", metavar="NAMESPACE", action="append", default=[], help="learn nothing of it"
    )
    add_listen_arguments(parser)
    given = parser.parse_args(arguments)

    async def serve() -> None:
        expected = Expected(tokenizer_hash=given.tokenizer_hash, model_hash=given.model_hash)
        learning = None
        if given.learn_for:
            # A local import: it needs torch, which a server without learning does not.
            from ..cluster.retrieval import model_fingerprint  # noqa: PLC0415

            learning = open_learning(
                given.store, model_fingerprint(given.learn_for), given.learn_off
            )
        store = open_store(given.store, must_exist=learning is None)
        service = RetrievalService(store, expected, learning=learning)
        server = RetrievalServer(
            service,
            **listen_settings(given),
            is_serving=lambda: service.status.is_serving,
            learn=None if learning is None else service.learn,
        )
        # Otherwise the first batches would be late, and distort the estimate of a lookup's time.
        await asyncio.to_thread(load_compiled_lookup)
        # A failed load is an error at the start; later, the last content stays in service.
        await asyncio.to_thread(service.refresh)
        service.start()
        await serve_until_signal(server.start, server.stop)
        await asyncio.to_thread(service.stop)

    return run_server("retrieval_server", serve)


def _removed_store_env(_name: str) -> NoReturn:
    raise argparse.ArgumentTypeError(
        f"was removed; {REMOVED_FLAGS['retrieval_server', '--store-env']}"
    )


if __name__ == "__main__":
    sys.exit(main())
