"""A step that stands for any other: for measuring and warming up."""

from __future__ import annotations

import numpy as np

from ..steps import SamplingRows, StepInput


def prompt_step(count: int, block_size: int) -> StepInput:
    """A prompt of `count` tokens, every one of which gets a target token, as nodes do.

    It writes the first `count` slots: only for caches that hold nothing yet.
    """
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
