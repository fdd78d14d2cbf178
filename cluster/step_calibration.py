"""Measures what a step takes on a pipeline, before it serves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..core.step_cost import StepCost
from ..core.types import SamplingRows, StepInput
from .pipeline import Pipeline

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
            await pipeline.submit(_step(count, block_size))
            times.append(clock() - start)
        seconds.append(min(times))
    return StepCost(rows, seconds)


def _step(count: int, block_size: int) -> StepInput:
    """A prompt of `count` tokens, every one of which gets a target token, as nodes do."""
    index = np.arange(count, dtype=np.int32)
    none = np.empty(0, dtype=np.int32)
    return StepInput(
        step_id=0,
        moves=np.empty((0, 2), dtype=np.int32),
        token_ids=np.zeros(count, dtype=np.int32),
        positions=index,
        slots=index,
        request_starts=np.array([0, count], dtype=np.int32),
        context_lens=np.zeros(1, dtype=np.int32),
        block_tables=np.arange(-(-count // block_size), dtype=np.int32)[None],
        trees=(None,),
        logits_rows=index,
        sampling=SamplingRows.greedy(index.astype(np.int64) + 1),
        probe_rows=none,
        probe_top_k=0,
        scored_rows=none,
        scored_tokens=none,
    )
