"""Serves a plain drafter to the coordinators that connect to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import grpc

from ...core.errors import ProtocolError
from ...core.interfaces import Drafter, OwningDrafter
from ..transport.stage_failure import is_device_lost
from . import drafter_pb2 as pb
from .failures import FailureLog, failure_reason
from .link import DrafterSession, is_report_due
from .wire import (
    DEFAULT_MAX_BYTES,
    METHOD,
    decode_hello,
    decode_step,
    encode_answer,
    encode_error,
    encode_hello,
)

logger = logging.getLogger(__name__)


class DrafterService:
    """The gRPC face of a drafter. One worker thread runs the drafter, for all connections.

    on_device_lost  called when the drafter's device failed for good: every later answer would be
                    an error
    """

    def __init__(
        self,
        drafter: Drafter,
        max_message_bytes: int = DEFAULT_MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
        on_device_lost: Callable[[], object] = lambda: None,
    ) -> None:
        self._drafter = drafter
        self._on_device_lost = on_device_lost
        self._max_bytes = max_message_bytes
        self._clock = clock
        self._failures = FailureLog(logger, f"drafter={drafter.name}")
        self._numbers = itertools.count()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter")

    def handler(self) -> grpc.GenericRpcHandler:
        """What a gRPC server needs to serve this drafter."""
        service, method = METHOD.strip("/").split("/")
        rpc = grpc.stream_stream_rpc_method_handler(self._exchange)
        return grpc.method_handlers_generic_handler(service, {method: rpc})

    def close(self) -> None:
        """Wait for the worker, and free what the drafter holds; no connection may be left."""
        self._worker.shutdown()
        if isinstance(self._drafter, OwningDrafter):
            self._drafter.free()

    async def _exchange(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        session = DrafterSession(self._drafter, f"{next(self._numbers)}/")
        loop = asyncio.get_running_loop()
        try:
            decode_hello(await anext(requests, b""), pb.ToDrafter)
            yield encode_hello(self._drafter.name, pb.FromDrafter)
            # The next message is read after this one is answered: gRPC holds the sender back.
            async for data in requests:
                yield await loop.run_in_executor(self._worker, self._answer, session, data)
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            # After `close` there is no drafter to tidy up for.
            with contextlib.suppress(RuntimeError):
                # In the worker, which may still be at this session's last message.
                self._worker.submit(session.close)

    def _answer(self, session: DrafterSession, data: bytes) -> bytes:
        """Do what one message says. Raises `ProtocolError` if it is no message."""
        message = decode_step(data, self._clock())
        try:
            proposals, seconds = session.run(message)
            report = session.report() if is_report_due(message) else None
            return encode_answer(message, proposals, self._max_bytes, report, seconds)
        except Exception as error:
            logger.debug("drafter=%s event=raised", self._drafter.name, exc_info=True)
            reason = failure_reason(error)
            self._failures.log("raised", reason)
            if is_device_lost(error):
                self._on_device_lost()
            return encode_error(message.sequence, reason)
