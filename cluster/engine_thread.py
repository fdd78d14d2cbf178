"""Runs an engine in a thread of its own, with its own event loop.

Steps block that loop for as long as the target computes, so nothing else lives on it: callers
of any thread hand requests over and hear of them through their sinks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from ..core.engine import EngineCore
from ..core.errors import DraftlineError, EngineClosed, StageLost
from ..core.request import Request
from ..core.stop import StopRule
from .loop_calls import call_on_loop

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A replica whose stages die again and again is of no use: its supervisor should replace it.
MAX_RECOVERIES = 5


class EngineParts(Protocol):
    """What the thread runs: an engine over parts that start, recover and stop."""

    core: EngineCore

    async def start(self) -> None:
        """Load everything."""
        ...

    async def recover(self) -> None:
        """Replace a lost pipeline by a new one; all requests have ended."""
        ...

    async def stop(self) -> None:
        """Free everything, in bounded time."""
        ...


class EngineThread:
    """One engine's thread. `start` before all else; `close` ends what still runs."""

    def __init__(self, build: Callable[[], Awaitable[EngineParts]]) -> None:
        self._build = build
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="draftline-engine", daemon=True)
        self._started: Future[EngineParts] = Future()
        self._wake = asyncio.Event()
        self._closing = False
        self._num_recoveries = 0
        self._error: DraftlineError | None = None

    def start(self) -> EngineParts:
        """Load the engine; blocks. Raises what loading raises."""
        self._thread.start()
        return self._started.result()

    @property
    def is_healthy(self) -> bool:
        """Whether requests can be served now."""
        return self._thread.is_alive() and self._started.done() and self._error is None

    def add(self, request: Request, stop: StopRule) -> None:
        """Queue a request. Raises `CapacityError`; `StageLost`, `EngineClosed` while it is down."""
        self.submit(request, stop).result()

    def submit(self, request: Request, stop: StopRule) -> Future[None]:
        """Queue a request between two steps; the future raises what `add` raises."""
        return self.call(self._add(request, stop))

    def cancel(self, request_id: str) -> None:
        """End a request soon; an unknown id is ignored. Does not wait."""
        call_on_loop(self._loop, self._cancel, request_id)

    def call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the engine's loop, between two steps."""
        if not self._thread.is_alive():
            work.close()
            raise EngineClosed("the engine is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End all requests and the thread; twice is once."""
        if self._thread.is_alive():
            call_on_loop(self._loop, self._ask_to_close)
            self._thread.join()

    def _ask_to_close(self) -> None:
        self._closing = True
        self._wake.set()

    async def _add(self, request: Request, stop: StopRule) -> None:
        if self._error is not None:
            raise self._error
        self._started.result().core.add(request, stop)
        self._wake.set()

    def _cancel(self, request_id: str) -> None:
        self._started.result().core.cancel(request_id)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        try:
            parts = await self._build()
            await parts.start()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in `start`
            self._started.set_exception(error)
            return
        self._started.set_result(parts)
        try:
            await self._serve(parts)
        finally:
            parts.core.fail_all(EngineClosed("the engine was closed"))
            await parts.stop()

    async def _serve(self, parts: EngineParts) -> None:
        while not self._closing:
            if not parts.core.has_work:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                await parts.core.step()
            except StageLost as error:
                await self._recover(parts, error)
            # New requests and cancellations arrive between two steps.
            await asyncio.sleep(0)

    async def _recover(self, parts: EngineParts, error: StageLost) -> None:
        logger.error("event=stage_lost error=%r", str(error))
        self._error = StageLost("the engine is recovering from a lost stage; try again")
        self._num_recoveries += 1
        if self._num_recoveries > MAX_RECOVERIES:
            self._error = StageLost(f"the engine lost its stages {self._num_recoveries} times")
            self._closing = True
            return
        await parts.recover()
        self._error = None
        logger.info("event=stage_recovered count=%d", self._num_recoveries)
