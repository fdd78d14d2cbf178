"""What the way between pipeline stages in processes of their own costs.

Run `python -m draftline.benchmarks.transport.stage_transport`. Stages that compute nothing, so that
all time is that of messages; of two numbers of stages, the difference is that of their hops. Prints
a table and writes `benchmarks/results/stage_transport.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from ...actors.kept_actors import KeptStages, OwnKeeper
from ...cluster.pipeline.ray_pipeline import RayPipeline
from ...core.errors import StageLost
from ...core.steps import SamplingRows, StepInput, StepOutput
from ...measure.records.record import machine
from ...models.load.partition import LayerSpan
from .echo_stage import DEATH, EchoSpec

RESULTS = Path(__file__).parents[1] / "results"
HIDDEN_SIZE = 256
NUM_ROWS = (1, 4, 16, 32, 512)
IN_FLIGHT = (1, 3)
BLOCK_STEPS = 20


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Latency from submit to answer, and throughput, of one setting."""

    num_stages: int
    hidden_size: int
    num_rows: int
    in_flight: int
    median_ms: float
    p99_ms: float
    steps_per_s: float


@dataclass(frozen=True, slots=True)
class LifeTimes:
    """Seconds that starting, noticing a death, and closing take."""

    num_stages: int
    start_s: float
    close_s: float
    death_s: float
    close_after_death_s: float


def main() -> None:
    """Measure every setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=20, help="blocks of steps of each setting")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", type=int, nargs="+", default=NUM_ROWS, help="of a step")
    parser.add_argument("--hidden-size", type=int, default=HIDDEN_SIZE, help="numbers of a row")
    parser.add_argument("--output", type=Path, default=RESULTS / "stage_transport.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("draftline").setLevel(logging.ERROR)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
             object_store_memory=200_000_000)  # fmt: skip
    steps: list[StepTimes] = []
    lives: list[LifeTimes] = []
    for num_stages in args.stages:
        specs = _specs(num_stages, args.hidden_size)
        asyncio.run(_measure(specs, args.rows, args.blocks, steps, lives))
    ray.shutdown()
    _write(args.output, steps, lives)


async def _measure(
    specs: Sequence[EchoSpec],
    rows: Sequence[int],
    num_blocks: int,
    steps: list[StepTimes],
    lives: list[LifeTimes],
) -> None:
    pipeline = RayPipeline(
        specs, KeptStages(OwnKeeper()), transport="distributed", max_in_flight=max(IN_FLIGHT)
    )
    start_s = await _seconds(pipeline.start())
    for num_rows, in_flight in product(rows, IN_FLIGHT):
        times = await _step_times(pipeline, num_rows, in_flight, num_blocks)
        steps.append(StepTimes(len(specs), specs[0].hidden_size, num_rows, in_flight, *times))
        print(_line(steps[-1]), flush=True)
    close_s = await _seconds(pipeline.close())
    await pipeline.start()
    death_s = await _seconds(_die(pipeline))
    again_s = await _seconds(pipeline.close())
    lives.append(LifeTimes(len(specs), start_s, close_s, death_s, again_s))
    print(_line(lives[-1]), flush=True)


async def _step_times(
    pipeline: RayPipeline, num_rows: int, in_flight: int, num_blocks: int
) -> tuple[float, float, float]:
    """Median and 99th percentile of milliseconds, and steps a second."""
    blocks: list[list[float]] = []
    seconds = 0.0
    for _ in range(num_blocks):
        blocks.append([])
        seconds += await _seconds(_block(pipeline, num_rows, in_flight, blocks[-1]))
    # The first block warms caches and buffers up.
    median, p99 = np.percentile(np.concatenate(blocks[1:]), [50, 99]) * 1e3
    rate = num_blocks * BLOCK_STEPS / seconds
    return round(float(median), 3), round(float(p99), 3), round(rate, 3)


async def _block(
    pipeline: RayPipeline, num_rows: int, in_flight: int, latencies: list[float]
) -> None:
    step = _step(num_rows)
    sent: deque[tuple[Awaitable[StepOutput], float]] = deque()
    for _ in range(BLOCK_STEPS):
        if len(sent) == in_flight:
            await _answered(sent, latencies)
        now = time.perf_counter()
        sent.append((pipeline.submit(step), now))
    while sent:
        await _answered(sent, latencies)


async def _answered(
    sent: deque[tuple[Awaitable[StepOutput], float]], latencies: list[float]
) -> None:
    answer, start = sent.popleft()
    await answer
    latencies.append(time.perf_counter() - start)


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


def _specs(num_stages: int, hidden_size: int) -> list[EchoSpec]:
    return [
        EchoSpec(
            model_path="",
            span=LayerSpan(index, index + 1, num_stages),
            num_blocks=1,
            block_size=16,
            hidden_size=hidden_size,
        )
        for index in range(num_stages)
    ]


def _step(num_rows: int, step_id: int = 0) -> StepInput:
    rows = np.arange(num_rows, dtype=np.int32)
    none = np.empty(0, dtype=np.int32)
    return StepInput(
        step_id=step_id, moves=np.empty((0, 2), dtype=np.int32), token_ids=rows, positions=rows,
        slots=rows, request_starts=np.array([0, num_rows], dtype=np.int32),
        context_lens=np.zeros(1, dtype=np.int32), block_tables=np.zeros((1, 64), dtype=np.int32),
        trees=(None,), logits_rows=rows,
        sampling=SamplingRows.greedy(rows.astype(np.int64)),
        probe_rows=none, probe_top_k=0, scored_rows=none, scored_tokens=none,
    )  # fmt: skip


def _line(times: StepTimes | LifeTimes) -> str:
    return "  ".join(f"{name} {value}" for name, value in asdict(times).items())


def _write(output: Path, steps: list[StepTimes], lives: list[LifeTimes]) -> None:
    report = {
        "machine": machine().fields(),
        "ray": ray.__version__,
        "load": [round(load, 2) for load in os.getloadavg()],
        "steps": list(map(asdict, steps)),
        "lives": list(map(asdict, lives)),
    }
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
