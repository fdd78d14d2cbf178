"""Measures what a step takes on a pipeline, before it serves."""

from __future__ import annotations

from collections.abc import Callable

from ...core.schedule.step_cost import StepCost
from ...core.step.prompt_step import prompt_step
from ..transport.stage_spec import Pipeline

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
# The first pass of a shape may still allocate or compile.
ROUNDS = 3


async def measure_step_cost(
    pipeline: Pipeline, max_rows: int, block_size: int, clock: Callable[[], float]
) -> StepCost:
    """The cost curve of an idle pipeline; its KV slots are free still. Raises `StageLost`."""
    rows = [count for count in ROWS if count <= max_rows]
    seconds = []
    for count in rows:
        times = []
        for _ in range(ROUNDS):
            start = clock()
            await pipeline.submit(prompt_step(count, block_size))
            times.append(clock() - start)
        seconds.append(min(times))
    return StepCost(rows, seconds)
