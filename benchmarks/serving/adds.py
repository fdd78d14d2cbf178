"""How long adding requests takes beside steps that keep the engine's loop busy.

    python -m draftline.benchmarks.serving.adds [--requests 32] [--step-ms 50]

One simulated stage that blocks the engine's own loop for the whole step, and one request that
decodes. Others are added from another event loop, in turn: each by a worker thread that waits until
it is queued (4 threads, as `off_loop` has), and as entries of the queue. Prints until when the
caller awaits, and until when all are queued; writes JSON.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ...cluster.engine.engine_thread import EngineThread
from ...cluster.loop_calls import off_loop
from ...core.engine import EngineCore
from ...core.request.request import Request
from ...core.request.sampling_params import SamplingParams
from ...core.request.stop import SilentStream, StopRule
from ...core.schedule.block_pool import BlockPool
from ...core.schedule.budget import NodeBudget
from ...core.schedule.scheduler import Scheduler, SchedulerLimits
from ...core.step.builder import load_kernels
from ...core.steps import StepInput, StepOutput
from ...measure.records.record import machine
from ..step.simulated_pipeline import (
    BLOCK_SIZE,
    PROMPT_LEN,
    CountingDrafters,
    SimulatedPipeline,
)

RESULTS = Path(__file__).parents[1] / "results" / "adds.json"
# Tokens of the request that decodes: more than there are steps.
DECODING = 2_000

Added = tuple[Request, StopRule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to add, medians over rounds.

    caller_ms  until whoever adds goes on, milliseconds
    queued_ms  until all are queued
    """

    way: str
    caller_ms: float
    queued_ms: float


class BlockingPipeline(SimulatedPipeline):
    """Its stage computes in the engine's thread for `step_s` seconds."""

    def __init__(self, step_s: float) -> None:
        super().__init__(1, 0.0)
        self._step_s = step_s

    def submit(self, step: StepInput) -> Awaitable[StepOutput]:
        """Block the loop for the time of a step."""
        time.sleep(self._step_s)
        return super().submit(step)


class Parts:
    """An engine with room for so many requests."""

    def __init__(self, num_requests: int, step_s: float) -> None:
        num_blocks = (num_requests + 1) * (PROMPT_LEN + DECODING) // BLOCK_SIZE
        limits = SchedulerLimits(
            max_running=num_requests + 1,
            max_waiting=0,
            max_step_rows=512,
            max_tree_nodes=0,
            max_probe_rows=0,
            num_groups=1,
        )
        scheduler = Scheduler(BlockPool(num_blocks, BLOCK_SIZE), limits)
        pipeline, budget = BlockingPipeline(step_s), NodeBudget(is_adaptive=False)
        self.core = EngineCore(pipeline, CountingDrafters(0), scheduler, budget, time.monotonic)

    async def start(self) -> None:
        """Nothing to load."""

    async def recover(self) -> tuple[int, ...]:
        """Nothing is lost."""
        return ()

    async def stop(self) -> None:
        """Nothing to free."""


def main(
    *,
    requests: Annotated[int, typer.Option(help="Requests that are added at once.")] = 32,
    step_ms: Annotated[float, typer.Option(help="How long a step blocks its loop.")] = 50.0,
    rounds: Annotated[int, typer.Option(help="Times that each way is tried.")] = 7,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Compare the ways to add."""
    load_kernels()
    rows = measure(requests, step_ms / 1e3, rounds)
    table = Table("how requests are added", "caller awaits, ms", "all are queued, ms")
    for row in rows:
        table.add_row(row.way, f"{row.caller_ms:.2f}", f"{row.queued_ms:.1f}")
    console = Console()
    console.print(table)
    console.print(machine().line())
    settings = {"requests": requests, "step_ms": step_ms, "rounds": rounds}
    content = {"machine": machine().fields(), **settings, "rows": [asdict(row) for row in rows]}
    output.write_text(json.dumps(content, indent=1) + "\n")


def measure(count: int, step_s: float, rounds: int) -> list[Row]:
    """Both ways in turn, beside one request that decodes."""
    parts = Parts(count, step_s)

    async def build() -> Parts:
        return parts

    thread = EngineThread(build)
    thread.start()
    thread.add(*_request("decoding", DECODING))
    found: dict[str, list[tuple[float, float]]] = {}
    for turn in range(rounds):
        for way, add in WAYS.items():
            added = [_request(f"{way}-{turn}-{index}", 1) for index in range(count)]
            found.setdefault(way, []).append(asyncio.run(add(thread, added)))
            # One step for the prompts, one for what was in flight.
            time.sleep(6 * step_s)
    thread.close()
    rows = []
    for way, times in found.items():
        caller, queued = (round(1e3 * statistics.median(x), 3) for x in zip(*times, strict=True))
        rows.append(Row(way=way, caller_ms=caller, queued_ms=queued))
    return rows


def _request(name: str, tokens: int) -> Added:
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    ids = np.arange(PROMPT_LEN, dtype=np.int32)
    request = Request(name, ids, params, 0, tokens, lambda _: None)
    return request, StopRule(params, (), tokens, SilentStream())


async def by_threads(thread: EngineThread, requests: list[Added]) -> tuple[float, float]:
    """Each waits in a worker thread; seconds until the caller goes on, and until all are queued."""
    began = time.perf_counter()
    await asyncio.gather(*(off_loop(thread.add, *one) for one in requests))
    seconds = time.perf_counter() - began
    return seconds, seconds


async def by_queue(thread: EngineThread, requests: list[Added]) -> tuple[float, float]:
    """Each is an entry of the queue; as above."""
    began = time.perf_counter()
    for one in requests:
        thread.enqueue(*one)
    seconds = time.perf_counter() - began
    await asyncio.to_thread(thread.take_enqueued)
    return seconds, time.perf_counter() - began


Way = Callable[[EngineThread, list[Added]], Coroutine[Any, Any, tuple[float, float]]]
WAYS: dict[str, Way] = {"worker threads that wait": by_threads, "queue entries": by_queue}


if __name__ == "__main__":
    typer.run(main)
