"""Limits of tenants where several API processes answer: one gate in the engine's process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ..api.http.gate import ALLOWED, Gate, TenantLimits, Verdict
from .client import SocketEngineClient
from .messages import Charge, Enter, FromEngine, GateMessage, Judged, Leave, TakeTokens


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
