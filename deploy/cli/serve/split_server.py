"""Serves with the engine in this process and the HTTP API in processes of its own.

This process takes the signals, prints, and has the exit code. Its end also ends the API
processes, which notice the end of their connection.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ....cluster.loop_calls import spare_collector
from ....core.errors import EngineFailed
from ...api.http.metrics import ServerMetrics
from ...engine.async_engine import AsyncEngine
from ...engine_process.messages import EngineSetup
from ...engine_process.server import EngineServer
from .api_processes import ApiProcesses

# Beyond the time of the requests: what it takes to end the rest, to tell their clients, and to end.
DRAIN_SLACK_S = 8.0
# When the engine has failed, its requests have their errors, which need only be sent.
FAILED_DRAIN_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitServer:
    """Arguments of `serve_split`.

    engine      not started
    failure     done with the reason when the engine fails
    listener    bound; the API processes listen on it
    setup       the first message to each of them
    count       of API processes
    on_ready    called when all answer
    on_drain    called with the number of running requests, if any
    drain_s     how long they may take
    """

    engine: AsyncEngine
    failure: Future[str]
    metrics: ServerMetrics
    listener: socket.socket
    setup: EngineSetup
    count: int
    on_ready: Callable[[], None]
    on_drain: Callable[[int], None]
    drain_s: float


def serve_split(parts: SplitServer) -> None:
    """Serve until SIGINT or SIGTERM, then drain.

    Raises what the engine's start raises; `EngineFailed` where it or the API cannot go on.
    """
    asyncio.run(_serve(parts))


async def _serve(parts: SplitServer) -> None:
    signals = _signals()
    server = EngineServer(parts.engine, parts.metrics)
    processes = ApiProcesses(server, parts.listener, parts.setup, parts.count)
    await server.gate.start()
    # They import their libraries while the engine loads.
    processes.start()
    try:
        await parts.engine.start()
        server.loaded()
        await processes.wait_serving()
        spare_collector()
        parts.on_ready()
        await _wait_for_end(parts, processes, signals)
    finally:
        await processes.close()
        server.close()
        await server.gate.close()
        await parts.engine.close()


async def _wait_for_end(
    parts: SplitServer, processes: ApiProcesses, signals: asyncio.Queue[int]
) -> None:
    signalled = asyncio.ensure_future(signals.get())
    failed = asyncio.wrap_future(parts.failure)
    ends: list[asyncio.Future[Any]] = [signalled, failed, processes.failed]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if failed.done() or processes.failed.done():
        signalled.cancel()
        await processes.drain()
        await processes.wait_ended(FAILED_DRAIN_S)
        raise EngineFailed(failed.result() if failed.done() else processes.failed.result())
    if num_running := await processes.drain():
        parts.on_drain(num_running)
    ended = asyncio.ensure_future(processes.wait_ended(parts.drain_s + DRAIN_SLACK_S))
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
