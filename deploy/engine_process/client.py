"""The API's side: an engine in another process, as the API's routes see one."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from typing import Literal, TypeVar

from ...core.errors import DraftlineError, EngineClosed, EngineFailed, StageLost
from ...core.request.output import Delta
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ..api.engine_client import EngineClient, RemoteEngineClient
from ..api.http.gate import ALLOWED, TenantLimits, Verdict
from ..engine.delta_queue import MAX_UNREAD_BYTES, DeltaQueue
from ..engine.stats import EngineStats
from .messages import (
    SILENCE_S,
    Add,
    Beat,
    Cancel,
    Charge,
    Connection,
    Draining,
    EngineSetup,
    Enter,
    Failed,
    FromEngine,
    GateMessage,
    Health,
    Hello,
    Judged,
    Leave,
    NextDelta,
    RefusedRequest,
    Reply,
    Serving,
    StartDrain,
    StateQuestion,
    StoreFailed,
    TakeTokens,
    decode_from_engine,
    packed_prompt,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# An engine's process that does not answer for this long is stopped or gone.
CONTROL_TIMEOUT_S = 5.0
LOST = "its process is gone"


class SocketEngineClient(RemoteEngineClient):
    """An engine at the other end of a socket. `start` connects; one event loop uses it.

    model             folder or hub id of its target, for the tokenizer
    max_unread_bytes  most bytes that wait for the reader of a stream; more ends the request
    on_drain          called for each `StartDrain`; returns the number of running requests
    lost              future of the reason when the engine's process is gone
    """

    def __init__(
        self,
        end: socket.socket,
        model: str,
        *,
        max_unread_bytes: int | None = None,
        on_drain: Callable[[], int] = lambda: 0,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._end = end
        self._model = model
        self._max_unread_bytes = max_unread_bytes or MAX_UNREAD_BYTES
        self._on_drain = on_drain
        self._silence_s = silence_s
        self._numbers = itertools.count()
        self._streams: dict[int, DeltaQueue] = {}
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._verdicts: dict[int, asyncio.Future[Verdict]] = {}
        self._is_healthy = False
        self._is_closed = False
        self.lost: Future[str] = Future()

    async def start(self) -> None:
        """Read the model's tokenizer, and wait until the engine has loaded.

        Raises `CheckpointError`; `EngineFailed` where it does not.
        """
        loop = asyncio.get_running_loop()
        self._hello: asyncio.Future[Hello] = loop.create_future()
        self._connection = Connection(
            decode_from_engine,
            on_message=self._on_message,
            on_lost=self._on_lost,
            on_silence=self._on_silence,
            beat=Beat,
            silence_s=self._silence_s,
        )
        await loop.create_unix_connection(lambda: self._connection, sock=self._end)
        await self._load_tokenizer(self._model)
        self.max_model_len = (await self._hello).max_model_len

    async def close(self) -> None:
        """End all requests and the connection; the engine lives on."""
        self._is_closed = True
        self.end_requests(EngineClosed("the engine was closed"))
        self._connection.close()

    async def _batches(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        request_id: str,
    ) -> AsyncGenerator[list[Delta], None]:
        self._check_engine()
        number = next(self._numbers)
        packed = packed_prompt(prompt)
        deltas = DeltaQueue(
            asyncio.get_running_loop(),
            self._max_unread_bytes,
            on_full=lambda: self._connection.send(Cancel(number)),
        )
        self._streams[number] = deltas
        self._connection.send(Add(number, request_id, packed, params, options))
        try:
            while True:
                batch = await deltas.next_all()
                yield batch
                if batch[-1].finish_reason is not None:
                    return
        finally:
            # Not there any more: the engine has ended it.
            if self._streams.pop(number, None) is not None:
                self._connection.send(Cancel(number))

    async def stats(self) -> list[EngineStats]:
        """The engine's counters and gauges; none where it does not answer."""
        return list((await self._ask("stats")).stats)

    async def metrics_text(self) -> bytes:
        """The text of `/metrics`, of all API processes. Raises `StageLost` without an answer."""
        reply = await self._ask("metrics")
        if not reply.metrics:
            raise StageLost("the engine's process does not answer")
        return reply.metrics

    async def is_healthy(self) -> bool:
        """Whether the engine serves, by its last message."""
        return self._is_healthy and not (self._connection.is_lost or self._connection.is_silent)

    def tell_serving(self) -> None:
        """Report that this process answers requests."""
        self._connection.send(Serving())

    def end_requests(self, error: DraftlineError) -> None:
        """End all requests with an error, and cancel them in the engine."""
        streams, self._streams = self._streams, {}
        for number, deltas in streams.items():
            deltas.put(error)
            self._connection.send(Cancel(number))

    def _check_engine(self) -> None:
        """Raise if no request can be sent to the engine."""
        if self._is_closed:
            raise EngineClosed("the engine was closed")
        if self._connection.is_lost:
            raise EngineFailed(LOST)
        if self._connection.is_silent or self._connection.is_full:
            raise StageLost("the engine's process does not answer")

    async def _ask(self, what: Literal["stats", "metrics"]) -> Reply:
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self._connection.send(StateQuestion(number, what))
        try:
            return await asyncio.wait_for(reply, CONTROL_TIMEOUT_S)
        except TimeoutError:
            return Reply(number)
        finally:
            del self._replies[number]

    async def judged(self, ask: Callable[[int], GateMessage]) -> Verdict | None:
        """The verdict on the message that `ask` makes for a number; None without an answer."""
        number = next(self._numbers)
        verdict = self._verdicts[number] = asyncio.get_running_loop().create_future()
        self._connection.send(ask(number))
        try:
            return await asyncio.wait_for(verdict, CONTROL_TIMEOUT_S)
        except TimeoutError:
            return None
        finally:
            del self._verdicts[number]

    def tell(self, message: GateMessage) -> None:
        """Send a message without an answer."""
        self._connection.send(message)

    def _on_message(self, message: FromEngine) -> None:
        match message:
            case NextDelta():
                self._on_delta(message)
            case Failed():
                self._on_failed(message)
            case Health():
                self._is_healthy = message.is_healthy
            case Reply() | Judged():
                self._on_answer(message)
            case Hello():
                self._is_healthy = True
                _settle(self._hello, message)
            case StartDrain():
                self._connection.send(Draining(self._on_drain()))
            case EngineSetup():
                # Read before the loop ran.
                pass

    def _on_answer(self, message: Reply | Judged) -> None:
        if isinstance(message, Judged):
            _settle(self._verdicts.get(message.question), message.verdict)
        else:
            _settle(self._replies.get(message.question), message)

    def _on_delta(self, message: NextDelta) -> None:
        deltas = self._streams.get(message.number)
        if deltas is None:
            return
        if message.delta.finish_reason is not None:
            del self._streams[message.number]
        deltas.put(message.delta)

    def _on_failed(self, message: Failed) -> None:
        deltas = self._streams.pop(message.number, None)
        if deltas is not None:
            deltas.put(message.error())

    def _on_silence(self) -> None:
        if self._streams:
            logger.error("event=engine_process_silent seconds=%g", self._silence_s)
        # The engine may be paused: these messages reach it when it continues.
        self.end_requests(StageLost("the engine's process does not answer"))

    def _on_lost(self) -> None:
        if not self._hello.done():
            self._hello.set_exception(EngineFailed(LOST))
        error = EngineFailed(LOST)
        self.end_requests(error)
        for reply in self._replies.values():
            _settle(reply, Reply(0))
        if not self._is_closed and not self.lost.done():
            self.lost.set_result(LOST)


def _settle(future: asyncio.Future[T] | None, value: T) -> None:
    if future is not None and not future.done():
        future.set_result(value)


class EngineMetrics:
    """Metrics that the engine's process keeps, of all API processes and of those that died."""

    def __init__(self, engine_client: SocketEngineClient) -> None:
        self._engine_client = engine_client

    def record(self, delta: Delta, gap_s: float | None) -> None:
        """Nothing: the engine's process counts deltas."""

    def refused(self, tenant: str, reason: str) -> None:
        """Send a refusal to be counted."""
        self._engine_client.tell(RefusedRequest(tenant, reason))

    def store_failed(self, store: str) -> None:
        """Send a failure to be counted."""
        self._engine_client.tell(StoreFailed(store))

    async def text(self, engine_clients: Sequence[EngineClient]) -> bytes:  # noqa: ARG002 - the interface
        """The text of `/metrics`. Raises `StageLost` where the engine's process is silent."""
        return await self._engine_client.metrics_text()


class SocketGate:
    """The API's side; sends questions to the engine's process.

    is_open  whether requests go on where that does not answer; else they are refused
    """

    def __init__(self, engine_client: SocketEngineClient, *, is_open: bool) -> None:
        self._engine_client = engine_client
        self._failed = ALLOWED if is_open else Verdict(reason="unavailable")

    async def start(self) -> None:
        """Nothing: the connection is the engine client's."""

    async def close(self) -> None:
        """Nothing."""

    async def enter(self, limits: TenantLimits, request_id: str) -> Verdict:
        """Count a request, and take a place for it."""
        verdict = await self._engine_client.judged(lambda n: Enter(n, limits, request_id))
        return self._failed if verdict is None else verdict

    def leave(self, limits: TenantLimits, request_id: str) -> None:
        """Give its place back."""
        if limits.concurrency is not None:
            self._engine_client.tell(Leave(limits, request_id))

    async def take_tokens(self, limits: TenantLimits, count: int) -> Verdict:
        """Count a prompt."""
        if limits.tokens is None:
            return ALLOWED
        verdict = await self._engine_client.judged(lambda n: TakeTokens(n, limits, count))
        return self._failed if verdict is None else verdict

    def charge(self, limits: TenantLimits, count: int) -> None:
        """Count generated tokens."""
        if limits.tokens is not None:
            self._engine_client.tell(Charge(limits, count))
