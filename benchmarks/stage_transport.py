"""What the transports between pipeline stages cost.

Run `python -m draftline.benchmarks.stage_transport`. Stages that compute nothing, so that all time is the transport's. Prints a table and writes
`benchmarks/results/stage_transport-<date>.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import signal
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import numpy as np
import ray
import torch

from ..actors.stage_actor import spawn_stage
from ..cluster.pipeline import StageSpec
from ..cluster.ray_pipeline import RayPipeline, Transport
from ..core.errors import StageLost
from ..core.types import SamplingRows, StepInput, StepOutput
from ..models.partition import LayerSpan

RESULTS = Path(__file__).parent / "results"
HIDDEN_SIZE = 256
NUM_ROWS = (1, 16, 512)
IN_FLIGHT = (1, 3)
DEATH = -1


@dataclass(frozen=True, slots=True)
class EchoStage:
    """Passes arrays of the right shapes on."""

    is_last: bool

    def run(self, step: StepInput, hidden: torch.Tensor | None) -> torch.Tensor | StepOutput:
        """Nothing is computed; a step id of `DEATH` kills the last stage."""
        if not self.is_last:
            return torch.zeros(len(step.token_ids), HIDDEN_SIZE) if hidden is None else hidden
        if step.step_id == DEATH:
            os.kill(os.getpid(), signal.SIGKILL)
        return StepOutput(step.step_id, step.token_ids, step.moves, step.sampling.temperature)


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoSpec(StageSpec):
    """Builds an `EchoStage`."""

    def build(self) -> EchoStage:
        """See `StageSpec`."""
        return EchoStage(self.span.is_last)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Latency from submit to answer, and throughput, of one setting."""

    transport: str
    num_stages: int
    num_rows: int
    in_flight: int
    median_ms: float
    p99_ms: float
    steps_per_s: float


@dataclass(frozen=True, slots=True)
class LifeTimes:
    """Seconds that starting, noticing a death, and closing take."""

    transport: str
    num_stages: int
    start_s: float
    close_s: float
    death_s: float
    close_after_death_s: float


def main() -> None:
    """Measure every setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="steps of each setting")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=2, help="repeat all, transports alternating")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("draftline").setLevel(logging.ERROR)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
             object_store_memory=200_000_000)  # fmt: skip
    steps: list[StepTimes] = []
    lives: list[LifeTimes] = []
    for _ in range(args.rounds):
        for num_stages in args.stages:
            for transport in get_args(Transport):
                asyncio.run(_measure(transport, num_stages, args.steps, (steps, lives)))
    ray.shutdown()
    _write(steps, lives)


async def _measure(
    transport: Transport, num_stages: int, num_steps: int, into: tuple[list[Any], list[Any]]
) -> None:
    pipeline = RayPipeline(
        _specs(num_stages), spawn_stage, transport=transport, max_in_flight=max(IN_FLIGHT)
    )
    start_s = await _seconds(pipeline.start())
    for num_rows in NUM_ROWS:
        for in_flight in IN_FLIGHT:
            times = await _step_times(pipeline, transport, (num_rows, in_flight, num_steps))
            into[0].append(times)
            print(_line(times), flush=True)
    close_s = await _seconds(pipeline.close())
    await pipeline.start()
    death_s = await _seconds(_die(pipeline))
    again_s = await _seconds(pipeline.close())
    life = LifeTimes(transport, num_stages, start_s, close_s, death_s, again_s)
    into[1].append(life)
    print(_line(life), flush=True)


async def _step_times(
    pipeline: RayPipeline, transport: str, setting: tuple[int, int, int]
) -> StepTimes:
    num_rows, in_flight, num_steps = setting
    step = _step(num_rows)
    latencies: list[float] = []
    room = asyncio.Semaphore(in_flight)

    async def answered(waiting: Any, sent: float) -> None:
        await waiting
        latencies.append(time.perf_counter() - sent)
        room.release()

    for _ in range(20):
        await pipeline.submit(step)
    start = time.perf_counter()
    tasks: list[asyncio.Task[None]] = []
    for _ in range(num_steps):
        await room.acquire()
        sent = time.perf_counter()
        tasks.append(asyncio.create_task(answered(pipeline.submit(step), sent)))
    await asyncio.gather(*tasks)
    seconds = time.perf_counter() - start
    median, p99 = np.percentile(latencies, [50, 99]) * 1e3
    return StepTimes(
        transport, pipeline.num_stages, num_rows, in_flight,
        round(float(median), 3), round(float(p99), 3), round(num_steps / seconds, 1),
    )  # fmt: skip


async def _die(pipeline: RayPipeline) -> None:
    try:
        await pipeline.submit(_step(1, step_id=DEATH))
    except StageLost:
        return
    raise AssertionError("the last stage was killed and answered")


async def _seconds(awaitable: Any) -> float:
    start = time.perf_counter()
    await awaitable
    return round(time.perf_counter() - start, 3)


def _specs(num_stages: int) -> list[EchoSpec]:
    return [
        EchoSpec(
            model_path="",
            span=LayerSpan(index, index + 1, num_stages),
            num_blocks=1,
            block_size=16,
            hidden_size=HIDDEN_SIZE,
        )
        for index in range(num_stages)
    ]


def _step(num_rows: int, step_id: int = 0) -> StepInput:
    rows = np.arange(num_rows, dtype=np.int32)
    none, ones = np.empty(0, dtype=np.int32), np.ones(num_rows, dtype=np.float32)
    longs = rows.astype(np.int64)
    return StepInput(
        step_id=step_id, moves=np.empty((0, 2), dtype=np.int32), token_ids=rows, positions=rows,
        slots=rows, request_starts=np.array([0, num_rows], dtype=np.int32),
        context_lens=np.zeros(1, dtype=np.int32), block_tables=np.zeros((1, 64), dtype=np.int32),
        trees=(None,), logits_rows=rows,
        sampling=SamplingRows(ones, rows, ones, ones, longs, longs),
        probe_rows=none, probe_top_k=0, scored_rows=none, scored_tokens=none,
    )  # fmt: skip


def _line(times: StepTimes | LifeTimes) -> str:
    return "  ".join(f"{name} {value}" for name, value in asdict(times).items())


def _write(steps: list[StepTimes], lives: list[LifeTimes]) -> None:
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": [round(load, 2) for load in os.getloadavg()],
        "versions": {"ray": ray.__version__, "torch": str(torch.__version__)},
        "steps": list(map(asdict, steps)),
        "lives": list(map(asdict, lives)),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"stage_transport-{datetime.now(UTC):%Y-%m-%d}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
