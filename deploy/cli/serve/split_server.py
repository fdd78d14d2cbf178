"""Serves with the engine in this process and the HTTP API in processes of its own.

This process takes the signals, prints, and has the exit code. Its end also ends the API
processes, which notice the end of their connection.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ....cluster.loop_calls import spare_collector
from ....core.errors import EngineFailed
from ...api.http.metrics import ServerMetrics
from ...engine.async_engine import AsyncEngine
from ...engine_process.messages import EngineSetup
from ...engine_process.server import ApiSession, EngineServer
from ...settings.settings import ServeArgs
from ..progress import progress
from .api_process import packed_settings

# Beyond the time of the requests: what it takes to end the rest, to tell their clients, and to end.
DRAIN_SLACK_S = 8.0
# When the engine has failed, its requests have their errors, which need only be sent.
FAILED_DRAIN_S = 8.0


class SplitServer:
    """The engine of this process, and the API processes in front of it.

    listener  bound; the API processes listen on it
    on_ready  called when all answer
    on_drain  called with the number of running requests, if any
    """

    def __init__(
        self,
        args: ServeArgs,
        listener: socket.socket,
        *,
        on_ready: Callable[[], None],
        on_drain: Callable[[int], None],
    ) -> None:
        self._args = args
        self._listener = listener
        self._on_ready, self._on_drain = on_ready, on_drain
        # Done with the reason when the engine fails.
        self._failure: Future[str] = Future()
        self._engine = AsyncEngine(
            args.engine,
            on_failure=self._failure.set_result,
            usage_log=args.server.usage_log,
            progress=progress,
        )

    def serve(self) -> None:
        """Serve until SIGINT or SIGTERM, then drain.

        Raises what the engine's start raises; `EngineFailed` where it or the API cannot go on.
        """
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        signals = _signals()
        server = EngineServer(self._engine, ServerMetrics(self._args.model_name))
        # The first message to each of them.
        level = logging.getLogger().getEffectiveLevel()
        setup = EngineSetup(packed_settings(self._args), level)
        count = self._args.server.api_processes
        processes = ApiProcesses(server, self._listener, setup, count)
        await server.gate.start()
        # They import their libraries while the engine loads.
        processes.start()
        try:
            await self._engine.start()
            server.loaded()
            await processes.wait_serving()
            spare_collector()
            self._on_ready()
            await self._wait_for_end(processes, signals)
        finally:
            await processes.close()
            server.close()
            await server.gate.close()
            await self._engine.close()

    async def _wait_for_end(self, processes: ApiProcesses, signals: asyncio.Queue[int]) -> None:
        signalled = asyncio.ensure_future(signals.get())
        failed = asyncio.wrap_future(self._failure)
        ends: list[asyncio.Future[Any]] = [signalled, failed, processes.failed]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if failed.done() or processes.failed.done():
            signalled.cancel()
            await processes.drain()
            await processes.wait_ended(FAILED_DRAIN_S)
            raise EngineFailed(failed.result() if failed.done() else processes.failed.result())
        if num_running := await processes.drain():
            self._on_drain(num_running)
        drain_s = self._args.server.drain_timeout_s + DRAIN_SLACK_S
        ended = asyncio.ensure_future(processes.wait_ended(drain_s))
        again = asyncio.ensure_future(signals.get())
        await asyncio.wait([ended, again], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            # Once more: those that run end now.
            await processes.drain()
            await processes.wait_ended(DRAIN_SLACK_S)
        again.cancel()
        ended.cancel()


def _signals() -> asyncio.Queue[int]:
    """The signals that end the server, as they come."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, queue.put_nowait, number)
    return queue


logger = logging.getLogger(__name__)

MODULE = "draftline.deploy.cli.serve.api_process"
# If API processes die repeatedly, the server ends and should be replaced.
MAX_DEATHS_AN_HOUR = 5
HOUR_S = 3600.0
# Time for a process that has closed its connection to end by itself.
END_TIMEOUT_S = 5.0


class ApiProcesses:
    """API processes at one listening socket, each with a connection to the engine's server.

    failed  done, with the reason, when they cannot be kept alive
    """

    def __init__(
        self, server: EngineServer, listener: socket.socket, setup: EngineSetup, count: int
    ) -> None:
        self._server = server
        self._listener = listener
        self._setup = setup
        self._count = count
        self._deaths: deque[float] = deque()
        self._is_closing = False
        self._processes: set[asyncio.subprocess.Process] = set()
        self._sessions: set[ApiSession] = set()
        self._supervisors: list[asyncio.Task[None]] = []
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._serving: list[asyncio.Future[None]] = []

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that run."""
        return sorted(process.pid for process in self._processes)

    def start(self) -> None:
        """Start them; they wait for the engine by themselves."""
        loop = asyncio.get_running_loop()
        self._serving = [loop.create_future() for _ in range(self._count)]
        self._supervisors = [asyncio.create_task(self._keep(ready)) for ready in self._serving]
        for supervisor in self._supervisors:
            supervisor.add_done_callback(self._on_supervisor_done)

    async def wait_serving(self) -> None:
        """Wait until all answer. Raises `EngineFailed` if they die again and again."""
        serving = asyncio.gather(*self._serving)
        await asyncio.wait([serving, self.failed], return_when=asyncio.FIRST_COMPLETED)
        if self.failed.done():
            serving.cancel()
            raise EngineFailed(self.failed.result())

    async def drain(self) -> int:
        """Let them refuse new requests; returns the number of running ones."""
        self._is_closing = True
        sessions = list(self._sessions)
        self._server.drain()
        # A dead process has lost its requests, and a stopped one does not answer.
        answers = [asyncio.create_task(_first(one.draining, one.closed)) for one in sessions]
        if answers:
            await asyncio.wait(answers, timeout=END_TIMEOUT_S)
        return sum(one.draining.result() for one in sessions if one.draining.done())

    async def wait_ended(self, timeout_s: float) -> None:
        """Wait until all have ended, at most for so long."""
        self._is_closing = True
        if self._supervisors:
            await asyncio.wait(self._supervisors, timeout=timeout_s)

    async def close(self) -> None:
        """End those that still run, by force."""
        self._is_closing = True
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()
        if self._supervisors:
            await asyncio.wait(self._supervisors, timeout=END_TIMEOUT_S)
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)

    async def _keep(self, ready: asyncio.Future[None]) -> None:
        """Run one process, and restart it when it has ended."""
        while not self._is_closing:
            began = time.monotonic()
            status = await self._run(ready)
            if self._is_closing:
                return
            logger.error(
                "event=api_process_died status=%s seconds=%.0f", status, time.monotonic() - began
            )
            self._deaths.append(time.monotonic())
            while self._deaths[0] < time.monotonic() - HOUR_S:
                self._deaths.popleft()
            if len(self._deaths) > MAX_DEATHS_AN_HOUR:
                if not self.failed.done():
                    self.failed.set_result(
                        f"API processes died {len(self._deaths)} times within an hour"
                    )
                return

    def _on_supervisor_done(self, supervisor: asyncio.Task[None]) -> None:
        """Report why a process could not be started."""
        error = None if supervisor.cancelled() else supervisor.exception()
        if error is not None and not self.failed.done():
            self.failed.set_result(f"an API process could not be started: {error}")

    async def _run(self, ready: asyncio.Future[None]) -> int:
        """Run one process to its end; its exit status."""
        here, there = socket.socketpair()
        try:
            with there:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", MODULE),
                    *("--engine-fd", str(there.fileno())),
                    *("--listener-fd", str(self._listener.fileno())),
                    pass_fds=(there.fileno(), self._listener.fileno()),
                    # Ctrl-C in the terminal reaches this process, which ends its children.
                    start_new_session=True,
                )
        except BaseException:
            here.close()
            raise
        self._processes.add(process)
        here.setblocking(False)
        session = await self._server.connect(here, self._setup)
        self._sessions.add(session)
        session.serving.add_done_callback(
            lambda _: None if ready.done() else ready.set_result(None)
        )
        try:
            await session.closed
            # A silent process may be stopped, and not react to signals.
            with suppress(TimeoutError):
                return await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
            process.kill()
            return await process.wait()
        finally:
            self._sessions.discard(session)
            self._processes.discard(process)


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
