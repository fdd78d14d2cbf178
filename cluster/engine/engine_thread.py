"""Runs an engine in a thread of its own, with its own event loop.

Steps block that loop for as long as the target computes, so nothing else runs on it. Callers in any
thread submit requests, whose output goes to their sinks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from ...core.engine import EngineCore
from ...core.errors import (
    DeviceLost,
    DraftlineError,
    EngineClosed,
    EngineFailed,
    StageLost,
    place_in,
    place_of,
)
from ...core.request.request import Request
from ...core.request.stop import StopRule
from ..loop_calls import call_on_loop, end_tasks
from ..transport.stage_spec import wall_clock

logger = logging.getLogger(__name__)

T = TypeVar("T")

# starting    loading
# ready       steps can be run
# recovering  stages are being replaced; requests that run wait, new ones are refused
# failed      nothing can be run any more: the process must be replaced
# closed      on purpose
Health = Literal["starting", "ready", "recovering", "failed", "closed"]

# A replica whose stages die again and again is of no use: its supervisor should replace it.
MAX_RECOVERIES_AN_HOUR = 5
HOUR_S = 3600.0
# How much longer than its limit a step may take before the thread itself counts as stuck: the
# step's own limit goes first where the event loop is alive.
GRACE_S = 1.0
CLOSE_TIMEOUT_S = 20.0
STUCK_TIMEOUT_S = 2.0
# Seconds between two checks.
PERIOD_S = 0.25


@dataclass(frozen=True, slots=True)
class EngineTime:
    """The clocks of an engine: the machine's own, or those of a simulation.

    clock       seconds that never go back
    wall_clock  seconds, of traces
    new_loop    makes the engine's event loop, whose timers go by `clock`
    """

    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = wall_clock
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop


REAL_TIME = EngineTime()


class EngineParts(Protocol):
    """What the thread runs: an engine over parts that start, recover and stop."""

    core: EngineCore

    async def start(self) -> None:
        """Load everything."""
        ...

    async def recover(self) -> Sequence[int]:
        """Replace what of the pipeline is lost; these stages. Requests wait for it."""
        ...

    async def stop(self) -> None:
        """Free everything, in bounded time."""
        ...


class EngineThread:
    """One engine's thread. `start` before all else; `close` ends what still runs.

    recovery_timeout_s  how long stages may take to come back
    clock               seconds of the machine, also where the engine's time is simulated
    on_failure          called once, from any thread, with the reason when the engine cannot go on
    """

    def __init__(
        self,
        build: Callable[[], Awaitable[EngineParts]],
        *,
        recovery_timeout_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        engine_time: EngineTime = REAL_TIME,
        on_failure: Callable[[str], object] = lambda _reason: None,
    ) -> None:
        self._build = build
        self._recovery_timeout_s = recovery_timeout_s
        self._clock = clock
        self._on_failure = on_failure
        self._loop = engine_time.new_loop()
        self._thread = threading.Thread(target=self._run, name="draftline-engine", daemon=True)
        self._started: Future[EngineParts] = Future()
        self._wake = asyncio.Event()
        self._closing = False
        self._recoveries: deque[float] = deque()
        # How often lost stages were replaced.
        self.num_recoveries = 0
        self._lock = threading.Lock()
        self._calls: set[Future[Any]] = set()
        # Requests that are to be queued before the next step.
        self._arrivals: deque[tuple[Request, StopRule]] = deque()
        self._ended = False
        # Why requests are refused; None while they are taken.
        self._refusal: DraftlineError | None = None
        self._health: Health = "starting"
        self._watchdog = Watchdog(clock, self._hung)

    def start(self) -> EngineParts:
        """Load the engine; blocks. Raises what loading raises."""
        self._thread.start()
        return self._started.result()

    @property
    def health(self) -> Health:
        """What the engine is doing; a thread that is stuck in a step has failed."""
        return self._health

    @property
    def is_healthy(self) -> bool:
        """Whether steps can be run now."""
        return self._health == "ready" and self._thread.is_alive()

    def enqueue(self, request: Request, stop: StopRule) -> None:
        """Queue a request between two steps, without waiting for that.

        A `cancel` that follows finds it. Its sink gets what refuses it: `CapacityError`,
        `RequestError`, or `StageLost` while stages are replaced.

        Raises `EngineClosed` or `EngineFailed` where there is no engine any more.
        """
        with self._lock:
            if self._ended or not self._thread.is_alive():
                raise self._end_error()
            is_first = not self._arrivals
            self._arrivals.append((request, stop))
        if is_first:
            call_on_loop(self._loop, self._take_arrivals)

    def take_enqueued(self) -> None:
        """Wait until all that was enqueued is queued, or its sink has the error.

        Raises `EngineFailed`, `EngineClosed`.
        """
        try:
            self.call(asyncio.sleep(0)).result()
        except CancelledError:
            raise EngineClosed("the engine was closed") from None

    def after_step(self, function: Callable[[], object]) -> None:
        """Run `function` once the step is committed that this thread is in; at once in others."""
        if threading.get_ident() == self._thread.ident and not self._loop.is_closed():
            self._loop.call_soon(function)
        else:
            function()

    def cancel(self, request_id: str) -> None:
        """End a request soon; an unknown id is ignored. Does not wait."""
        call_on_loop(self._loop, self._cancel, request_id)

    def call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the engine's loop, between two steps.

        Raises `EngineClosed` or `EngineFailed` where there is none any more. The future is
        cancelled where the thread ends before the work does; where the thread is stuck, it raises
        `EngineFailed`.
        """
        with self._lock:
            if self._ended or not self._thread.is_alive():
                work.close()
                raise self._end_error()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    def close(self) -> None:
        """End all requests and the thread, in bounded time; twice is once."""
        if self._thread.is_alive():
            call_on_loop(self._loop, self._ask_to_close)
            # One that is stuck may stay so for ever.
            seconds = STUCK_TIMEOUT_S if self._health == "failed" else CLOSE_TIMEOUT_S
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._end_calls(EngineClosed("the engine was closed"))
                logger.warning("event=engine_thread_lingers seconds=%s", seconds)
        self._watchdog.close()
        if self._health != "failed":
            self._health = "closed"

    def _ask_to_close(self) -> None:
        self._closing = True
        self._wake.set()

    def _take_arrivals(self) -> None:
        """Queue what arrived since the last step, in order."""
        while True:
            with self._lock:
                if not self._arrivals:
                    break
                request, stop = self._arrivals.popleft()
            try:
                if self._refusal is not None:
                    raise self._refusal
                self._started.result().core.add(request, stop)
            except DraftlineError as error:
                request.sink(error)
        self._wake.set()

    def _end_error(self) -> DraftlineError:
        if isinstance(self._refusal, EngineFailed):
            return self._refusal
        return EngineClosed("the engine is closed")

    def _cancel(self, request_id: str) -> None:
        self._started.result().core.cancel(request_id)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            with self._lock:
                self._ended = True
                self._refusal = self._refusal or EngineClosed("the engine is closed")
            self._take_arrivals()
            self._loop.run_until_complete(end_tasks())
            self._loop.close()

    def _end_calls(self, error: DraftlineError) -> None:
        """Fail all waiting calls with `error`, though the loop is stuck."""
        with self._lock:
            self._ended = True
            self._refusal = self._refusal or error
            calls = list(self._calls)
        self._take_arrivals()
        for call in calls:
            # It may be done in this moment.
            with contextlib.suppress(Exception):
                call.set_exception(error)

    async def _main(self) -> None:
        try:
            parts = await self._build()
            await parts.start()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in `start`
            self._started.set_exception(error)
            return
        self._health = "ready"
        self._started.set_result(parts)
        self._watchdog.start()
        try:
            await self._serve(parts)
        except Exception as error:  # noqa: BLE001 - it supervises: its process is asked to end
            reason = str(error) if isinstance(error, DraftlineError) else place_of(error)
            self._fail(EngineFailed(f"the engine cannot go on: {reason}"))
        finally:
            self._refusal = self._refusal or EngineClosed("the engine was closed")
            parts.core.fail_all(self._refusal)
            await parts.stop()

    async def _serve(self, parts: EngineParts) -> None:
        while not self._closing and self._health != "failed":
            if not parts.core.has_work:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                with self._watchdog.watching(parts.core.deadline.limit_s + GRACE_S):
                    await parts.core.step()
            except DeviceLost:
                raise
            except StageLost as error:
                await self._recover(parts, error)
            # New requests and cancellations arrive between two steps.
            await asyncio.sleep(0)

    async def _recover(self, parts: EngineParts, error: StageLost) -> None:
        logger.info("event=stage_lost reason=%r", str(error))
        self._refusal = StageLost("the engine is recovering from a lost stage; try again")
        self._health = "recovering"
        self._require_few_recoveries(error)
        began = self._clock()
        try:
            replaced = await asyncio.wait_for(parts.recover(), self._recovery_timeout_s)
        except TimeoutError:
            raise StageLost(
                f"the stages did not come back within {self._recovery_timeout_s:g} s "
                f"(recovery_timeout_s) after a loss: {error}"
            ) from error
        self._refusal = None
        self._health = "ready"
        self.num_recoveries += 1
        # The one line of a loss that requests outlived; what cannot go on is logged by `_fail`.
        logger.warning(
            "event=stage_replaced stage=%s reason=%r seconds=%.1f requests=%d",
            ",".join(map(str, replaced)) or "none",
            str(error), self._clock() - began, parts.core.num_requests,
        )  # fmt: skip

    def _require_few_recoveries(self, error: StageLost) -> None:
        now = self._clock()
        self._recoveries.append(now)
        while self._recoveries[0] < now - HOUR_S:
            self._recoveries.popleft()
        if len(self._recoveries) > MAX_RECOVERIES_AN_HOUR:
            raise StageLost(
                f"stages were lost {len(self._recoveries)} times within an hour; the last: {error}"
            )

    def _hung(self, seconds: float) -> None:
        """Fail the engine, whose thread is stuck in a step; called by the watchdog's thread."""
        frame = sys._current_frames().get(self._thread.ident or 0)  # noqa: SLF001 - the only way to see where it is
        logger.error("event=step_hangs place=%s", place_in(traceback.extract_stack(frame)))
        error = EngineFailed(f"a step has not ended for {seconds:.0f} s (step_timeout_s)")
        self._fail(error)
        self._started.result().core.abandon(error)
        self._end_calls(error)

    def _fail(self, error: EngineFailed) -> None:
        self._refusal = error
        self._health = "failed"
        logger.critical("event=engine_failed reason=%r", str(error))
        self._on_failure(str(error))


class Watchdog:
    """Tells once when a piece of work takes longer than its limit.

    clock    seconds that never go back
    on_hang  called in the watchdog's thread with how long the work has taken
    """

    def __init__(self, clock: Callable[[], float], on_hang: Callable[[float], None]) -> None:
        self._clock = clock
        self._on_hang = on_hang
        # When the work began, and how long it may take; one value, so that both are of one work.
        self._work: tuple[float, float] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftline-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    @contextmanager
    def watching(self, limit_s: float) -> Iterator[None]:
        """Watch a block of work that may take `limit_s` seconds."""
        self._work = (self._clock(), limit_s)
        try:
            yield
        finally:
            self._work = None

    def close(self) -> None:
        """Look no more; twice is once."""
        self._closed.set()

    def look(self) -> bool:
        """Whether the work has taken too long; tells if so."""
        work = self._work
        if work is None:
            return False
        began, limit_s = work
        seconds = self._clock() - began
        if seconds <= limit_s:
            return False
        self._on_hang(seconds)
        return True

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            if self.look():
                return
