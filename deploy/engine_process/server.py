"""The engine's side: requests of API processes go to one engine, its deltas back.

Deltas of one step are committed in the engine's thread, gathered there, and handed to the event
loop of the sockets at once; each API process gets its own as one frame.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from ...cluster.loop_calls import call_on_loop
from ...core.errors import CapacityError, DraftlineError, ReaderTooSlow, as_request_failure
from ...core.request.output import Delta
from ..api.http.gate import CountingGate, Gate, TenantLimits
from .messages import (
    SILENCE_S,
    Add,
    Beat,
    Cancel,
    Charge,
    Connection,
    Draining,
    Enter,
    Failed,
    FromApi,
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
    decode_from_api,
)

if TYPE_CHECKING:
    from ..api.http.metrics import ServerMetrics
    from ..engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)


class EngineServer:
    """Serves one engine to API processes, on one event loop that is not the engine's."""

    def __init__(
        self,
        engine: AsyncEngine,
        recorder: ServerMetrics,
        *,
        gate: Gate | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`gate`: where limits of tenants are counted for all API processes."""
        self.engine = engine
        self.recorder = recorder
        self.gate = gate or CountingGate()
        self._silence_s = silence_s
        self._sessions: set[ApiSession] = set()
        self.is_loaded = False

    async def connect(self, end: socket.socket, first: FromEngine | None = None) -> ApiSession:
        """Serve the API process at the other end of a socket; `first` is the first message."""
        session = ApiSession(self, self._silence_s)
        session.closed.add_done_callback(lambda _: self._sessions.discard(session))
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: session.connection, sock=end)
        self._sessions.add(session)
        if first is not None:
            session.connection.send(first)
            session.connection.flush()
        if self.is_loaded:
            session.connection.send(self._hello())
        return session

    def loaded(self) -> None:
        """Tell all API processes that the engine takes requests."""
        self.is_loaded = True
        for session in self._sessions:
            session.connection.send(self._hello())

    def drain(self) -> None:
        """Let all API processes refuse new requests and end; the second call ends them at once."""
        for session in self._sessions:
            session.connection.send(StartDrain())

    def close(self) -> None:
        """End all connections after sending the queued messages."""
        for session in list(self._sessions):
            session.connection.close()

    def _hello(self) -> Hello:
        return Hello(self.engine.max_model_len)


class _Running:
    """A request of an API process. `sent_at`: when its last delta was sent, loop time."""

    __slots__ = ("adding", "engine_id", "sent_at", "tenant")

    def __init__(self, engine_id: str, tenant: str) -> None:
        self.engine_id = engine_id
        self.tenant = tenant
        self.adding: asyncio.Task[None] | None = None
        self.sent_at: float | None = None


class ApiSession:
    """One API process: its requests, and the messages to it.

    serving   done when it answers
    draining  done, with the number of requests that run, when it refuses new ones
    closed    done when its connection is lost; its requests are cancelled then
    """

    def __init__(self, server: EngineServer, silence_s: float) -> None:
        self._server = server
        self._engine = server.engine
        self._loop = loop = asyncio.get_running_loop()
        self.serving: asyncio.Future[None] = loop.create_future()
        self.draining: asyncio.Future[int] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.connection = Connection(
            decode_from_api,
            on_message=self._on_message,
            on_lost=self._on_lost,
            on_silence=self._on_silence,
            beat=lambda: Health(self._engine.is_healthy()),
            silence_s=silence_s,
        )
        self._gate = GateSession(server.gate, self.connection.send)
        self._running: dict[int, _Running] = {}
        # Committed by the engine's thread, and not yet passed to the loop.
        self._lock = threading.Lock()
        self._outbox: list[tuple[int, Delta | DraftlineError]] = []

    @property
    def num_running(self) -> int:
        """Its requests that have not ended."""
        return len(self._running)

    def _on_message(self, message: FromApi) -> None:
        match message:
            case Add():
                self._add(message)
            case Cancel():
                self._cancel(message.number)
            case StateQuestion():
                self.connection.send(self._reply(message))
            case Serving():
                _settle(self.serving, None)
            case Draining():
                _settle(self.draining, message.num_running)
            case Beat():
                pass
            case _:
                self._on_gate_message(message)

    def _on_gate_message(self, message: GateMessage) -> None:
        match message:
            case RefusedRequest():
                self._server.recorder.refused(message.tenant, message.reason)
            case StoreFailed():
                self._server.recorder.store_failed(message.store)
            case _:
                self._gate.on_message(message)

    def _add(self, message: Add) -> None:
        number = message.number
        if self._is_full(message.options.tenant):
            error = CapacityError(f"{len(self._running)} requests run or wait; try again later")
            error.retry_after_s = self._engine.retry_after_s()
            self.connection.send(Failed.of(number, error))
            return
        running = self._running[number] = _Running(message.request_id, message.options.tenant)
        running.adding = asyncio.create_task(self._queue(message, running))

    def _is_full(self, tenant: str) -> bool:
        """Whether one more of this tenant is refused unasked. The engine has places beyond its
        capacity for tenants that have few (`core/fair_share.py`)."""
        capacity = self._engine.capacity
        if len(self._running) < capacity:
            return False
        counts = Counter(running.tenant for running in self._running.values())
        return counts[tenant] * len({*counts, tenant}) >= capacity

    async def _queue(self, message: Add, running: _Running) -> None:
        number = message.number
        sink = partial(self._on_output, number)
        try:
            await self._engine.add(
                message.request_id,
                message.prompt_ids(),
                message.params,
                message.options,
                sink,
                with_text=False,
            )
        except Exception as error:  # noqa: BLE001 - it supervises: its API process gets the error
            self._send(number, as_request_failure(error, message.request_id))
        finally:
            running.adding = None

    def _cancel(self, number: int) -> None:
        running = self._running.pop(number, None)
        if running is None:
            return
        if running.adding is None:
            self._engine.cancel(running.engine_id)
        else:
            # Its grammar may still be in preparation.
            engine_id = running.engine_id
            running.adding.add_done_callback(lambda _: self._engine.cancel(engine_id))

    def _on_output(self, number: int, event: Delta | DraftlineError) -> None:
        """Take an event from any thread."""
        with self._lock:
            self._outbox.append((number, event))
            is_first = len(self._outbox) == 1
        if is_first:
            self._engine.after_step(self._hand_over)

    def _hand_over(self) -> None:
        with self._lock:
            events, self._outbox = self._outbox, []
        call_on_loop(self._loop, self._send_all, events)

    def _send_all(self, events: list[tuple[int, Delta | DraftlineError]]) -> None:
        for number, event in events:
            self._send(number, event)
        self.connection.flush()

    def _send(self, number: int, event: Delta | DraftlineError) -> None:
        running = self._running.get(number)
        if running is None:
            return
        if isinstance(event, DraftlineError):
            del self._running[number]
            self.connection.send(Failed.of(number, event))
            return
        now = self._loop.time()
        gap_s = None if running.sent_at is None else now - running.sent_at
        running.sent_at = now
        self._server.recorder.record(event, gap_s)
        if self.connection.is_full:
            self._cancel(number)
            error = ReaderTooSlow("the process that answers the client does not read")
            self.connection.send(Failed.of(number, error))
            return
        if event.finish_reason is not None:
            del self._running[number]
        self.connection.send(NextDelta(number, event))

    def _reply(self, message: StateQuestion) -> Reply:
        stats = [self._engine.stats()] if self._server.is_loaded else []
        if message.what == "metrics":
            return Reply(message.question, metrics=self._server.recorder.render(stats))
        return Reply(message.question, tuple(stats))

    def _on_silence(self) -> None:
        logger.error("event=api_process_silent seconds=%g", self.connection.silence_s)
        self.connection.abort()

    def _on_lost(self) -> None:
        for number in list(self._running):
            self._cancel(number)
        self._gate.close()
        _settle(self.closed, None)


class GateSession:
    """The engine's side of one API process: answers its questions, and frees its places.

    answer  sends a message to that process
    """

    def __init__(self, gate: Gate, answer: Callable[[FromEngine], object]) -> None:
        self._gate = gate
        self._answer = answer
        self._held: dict[str, TenantLimits] = {}
        self._judging: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def on_message(self, message: GateMessage) -> None:
        """Take a message of the gate's."""
        match message:
            case Enter():
                self._judge(self._enter(message))
            case TakeTokens():
                self._judge(self._take_tokens(message))
            case Leave():
                self._leave(message.request_id)
            case Charge():
                self._gate.charge(message.limits, message.count)

    def close(self) -> None:
        """Free the places of the requests of a process that is gone."""
        self._is_closed = True
        for request_id in list(self._held):
            self._leave(request_id)

    async def _enter(self, message: Enter) -> None:
        verdict = await self._gate.enter(message.limits, message.request_id)
        if verdict.is_allowed:
            self._held[message.request_id] = message.limits
            if self._is_closed:
                self._leave(message.request_id)
        self._answer(Judged(message.question, verdict))

    async def _take_tokens(self, message: TakeTokens) -> None:
        verdict = await self._gate.take_tokens(message.limits, message.count)
        self._answer(Judged(message.question, verdict))

    def _leave(self, request_id: str) -> None:
        limits = self._held.pop(request_id, None)
        if limits is not None:
            self._gate.leave(limits, request_id)

    def _judge(self, judging: Awaitable[None]) -> None:
        task = asyncio.ensure_future(judging)
        self._judging.add(task)
        task.add_done_callback(self._judging.discard)


def _settle(future: asyncio.Future, value: object) -> None:
    if not future.done():
        future.set_result(value)
