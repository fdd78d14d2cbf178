"""Serves a plain drafter to the coordinators that connect to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, TypeVar

import grpc

from ...core.errors import ProtocolError
from ...core.interfaces import (
    CachingDrafter,
    Drafter,
    FeatureDrafter,
    LearningDrafter,
    OwningDrafter,
    PrefixCounts,
)
from ...core.proposals import Commit, FeatureLayers, FeatureRows, Proposal, Query
from ..transport.stage_spec import is_device_lost
from .failures import FailureLog, failure_reason
from .features import MAX_FEATURE_BYTES, feature_bytes
from .link import DrafterMessage, DrafterReport, DraftSeconds, is_report_due
from .wire import (
    DEFAULT_MAX_BYTES,
    METHOD,
    Greeting,
    decode_hello,
    decode_part,
    encode_answer,
    encode_error,
    encode_hello,
)

logger = logging.getLogger(__name__)
NamedT = TypeVar("NamedT", Commit, Query, FeatureRows)

DRAIN_PERIOD_S = 0.02


class DrafterLoad(NamedTuple):
    """Means over a period.

    busy     share of the time that the drafter worked, 0 to 1
    waiting  messages that waited for it
    """

    busy: float
    waiting: float


class WorkMeter:
    """Follows the messages at a server that works on one at a time, in the order of arrival.

    clock  seconds; only differences count
    """

    __slots__ = ("_busy_s", "_clock", "_num_messages", "_read_at", "_seen_at", "_waiting_s")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_messages = 0
        self._read_at = self._seen_at = clock()
        self._busy_s = self._waiting_s = 0.0

    def enter(self) -> None:
        """A message arrived."""
        self._catch_up()
        self._num_messages += 1

    def leave(self) -> None:
        """A message is done."""
        self._catch_up()
        self._num_messages -= 1

    def read(self) -> DrafterLoad:
        """The means since the last reading; there is one reader."""
        self._catch_up()
        took_s = self._seen_at - self._read_at
        work = (
            DrafterLoad(self._busy_s / took_s, self._waiting_s / took_s)
            if took_s > 0
            else DrafterLoad(0, 0)
        )
        self._read_at, self._busy_s, self._waiting_s = self._seen_at, 0.0, 0.0
        return work

    def _catch_up(self) -> None:
        now = self._clock()
        since_s, self._seen_at = now - self._seen_at, now
        if self._num_messages:
            self._busy_s += since_s
            self._waiting_s += since_s * (self._num_messages - 1)


def features_read(drafter: Drafter) -> FeatureLayers | None:
    """What a drafter reads of the target's states; None: nothing."""
    return drafter.feature_layers if isinstance(drafter, FeatureDrafter) else None


class DrafterSession:
    """One coordinator's requests at a drafter; `prefix` keeps their ids apart from others'."""

    __slots__ = ("_drafter", "_failures", "_open_ids", "_prefix")

    def __init__(self, drafter: Drafter, prefix: str = "") -> None:
        self._drafter = drafter
        self._prefix = prefix
        self._failures = FailureLog(logger, f"drafter={drafter.name}")
        self._open_ids: set[str] = set()

    @property
    def num_open(self) -> int:
        """Requests that are open."""
        return len(self._open_ids)

    def report(self) -> DrafterReport:
        """Memory, learning and cache of the drafter, for all coordinators together.

        Raises what the drafter raises.
        """
        drafter = self._drafter
        learning = drafter.learning_counts if isinstance(drafter, LearningDrafter) else {}
        prefix = drafter.prefix_counts if isinstance(drafter, CachingDrafter) else PrefixCounts()
        return DrafterReport(drafter.memory_bytes, learning, prefix)

    def run(self, message: DrafterMessage) -> tuple[Sequence[Proposal], DraftSeconds]:
        """Do what one message says; also how long that took. Raises what the drafter raises."""
        drafter, clock = self._drafter, time.perf_counter
        start = clock()
        if message.last_commits:
            drafter.observe([self._named(commit) for commit in message.last_commits])
        for request_id in message.closes:
            drafter.close(self._prefix + request_id)
            self._open_ids.discard(self._prefix + request_id)
        for request in message.opens:
            request_id = self._prefix + request.request_id
            self._open_ids.add(request_id)
            drafter.open(replace(request, request_id=request_id) if self._prefix else request)
        opened = clock()
        if message.features and isinstance(drafter, FeatureDrafter):
            drafter.observe_features([self._named(rows) for rows in message.features])
        if message.commits:
            drafter.observe([self._named(commit) for commit in message.commits])
        observed = clock()
        queries = [self._named(query) for query in message.queries]
        proposals = drafter.propose(queries, message.deadline) if queries else []
        return proposals, DraftSeconds(opened - start, observed - opened, clock() - observed)

    def close(self) -> None:
        """Close every request. What the drafter raises is logged: it is given up anyway."""
        for request_id in self._open_ids:
            try:
                self._drafter.close(request_id)
            except Exception as error:
                logger.debug("drafter=%s event=close_raised", self._drafter.name, exc_info=True)
                self._failures.log("close_raised", failure_reason(error))
        self._open_ids.clear()

    def _named(self, part: NamedT) -> NamedT:
        return part._replace(request_id=self._prefix + part.request_id) if self._prefix else part


class FeatureInbox:
    """Features that arrived before the message they belong to, of one connection."""

    __slots__ = ("_num_bytes", "_read", "_rows")

    def __init__(self, read: FeatureLayers | None) -> None:
        """`read`: what the drafter reads."""
        self._read = read
        self._rows: list[FeatureRows] = []
        self._num_bytes = 0

    def add(self, rows: Sequence[FeatureRows]) -> None:
        """Keep them. Raises `ProtocolError` if they are not what the drafter reads, or too many."""
        row_len = 0 if self._read is None else self._read.row_len
        for own in rows:
            if own.values.shape[1] != row_len:
                raise ProtocolError(
                    f"wire: features of {own.values.shape[1]} numbers; the drafter reads {row_len}"
                )
        self._num_bytes += feature_bytes(rows)
        if self._num_bytes > MAX_FEATURE_BYTES:
            raise ProtocolError(f"wire: features of more than {MAX_FEATURE_BYTES} bytes")
        self._rows += rows

    def put_into(self, message: DrafterMessage) -> DrafterMessage:
        """The message with all that arrived; they are let go. Raises as `add`."""
        self.add(message.features)
        rows, self._rows, self._num_bytes = self._rows, [], 0
        return replace(message, features=rows) if rows else message


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
        self._sessions: set[DrafterSession] = set()
        self._is_draining = False
        self._meter = WorkMeter(clock)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter")

    def handler(self) -> grpc.GenericRpcHandler:
        """What a gRPC server needs to serve this drafter."""
        service, method = METHOD.strip("/").split("/")
        rpc = grpc.stream_stream_rpc_method_handler(self._exchange)
        return grpc.method_handlers_generic_handler(service, {method: rpc})

    @property
    def num_open(self) -> int:
        """Requests that are open, of all coordinators."""
        return self._num_open_beside(None)

    def _num_open_beside(self, own: DrafterSession | None) -> int:
        # A copy: the worker asks, too, while connections come and go.
        return sum(one.num_open for one in tuple(self._sessions) if one is not own)

    def read_work(self) -> DrafterLoad:
        """What there was to do since this was last asked."""
        return self._meter.read()

    async def drain(self, timeout_s: float) -> None:
        """Say with every answer that requests had better be opened elsewhere; wait until none is
        open, for `timeout_s` at most.
        """
        self._is_draining = True
        for _ in range(math.ceil(timeout_s / DRAIN_PERIOD_S)):
            if not self.num_open:
                break
            await asyncio.sleep(DRAIN_PERIOD_S)

    def close(self) -> None:
        """Wait for the worker, and free what the drafter holds; no connection may be left."""
        self._worker.shutdown()
        if isinstance(self._drafter, OwningDrafter):
            self._drafter.free()

    async def _exchange(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        session = DrafterSession(self._drafter, f"{next(self._numbers)}/")
        read = features_read(self._drafter)
        inbox = FeatureInbox(read)
        self._sessions.add(session)
        loop = asyncio.get_running_loop()
        try:
            decode_hello(await anext(requests, b""))
            yield encode_hello(Greeting(self._drafter.name, read))
            # The next message is read after this one is answered: gRPC holds the sender back.
            async for data in requests:
                self._meter.enter()
                try:
                    answer = await loop.run_in_executor(
                        self._worker, self._answer, session, inbox, data
                    )
                finally:
                    self._meter.leave()
                if answer is not None:
                    yield answer
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._sessions.discard(session)
            # After `close` there is no drafter to tidy up for.
            with contextlib.suppress(RuntimeError):
                # In the worker, which may still be at this session's last message.
                self._worker.submit(session.close)

    def _answer(self, session: DrafterSession, inbox: FeatureInbox, data: bytes) -> bytes | None:
        """Do what one message says; features before one wait, and have no answer.

        Raises `ProtocolError` if it is no message.
        """
        part = decode_part(data, self._clock())
        if not isinstance(part, DrafterMessage):
            inbox.add(part)
            return None
        message = inbox.put_into(part)
        try:
            proposals, seconds = session.run(message)
            report = session.report() if is_report_due(message) else None
            return encode_answer(
                message,
                proposals,
                self._max_bytes,
                report,
                seconds,
                is_draining=self._is_draining,
                num_others=self._num_open_beside(session),
            )
        except Exception as error:
            logger.debug("drafter=%s event=raised", self._drafter.name, exc_info=True)
            reason = failure_reason(error)
            self._failures.log("raised", reason)
            if is_device_lost(error):
                self._on_device_lost()
            return encode_error(message.sequence, reason)
