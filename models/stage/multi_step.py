"""Several tokens of each request in one step of a stage that holds the whole model.

Without drafts a token is a row, and what the engine does around the row may take longer than its
pass. Here the token goes back into the first layer without leaving the stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

from ...core.arrays import Int32
from ...core.steps import StepInput, StepOutput
from ..attention.operator import advance
from ..sampling import Sampler

# float32 logits [rows, vocabulary] after these tokens, int32 [rows], at the rows of the thread's
# step.
LogitsAfter = Callable[[Int32], Tensor]


def decode_steps(
    step: StepInput, block_size: int, logits_after: LogitsAfter, sampler: Sampler
) -> StepOutput:
    """The tokens of `step.num_decode_steps` passes; within `attending`.

    Each is the token that a step of its own would have chosen: the positions of the noise rise with
    those of the rows, and the KV of all rows but the last stands in its place when this returns.
    """
    count = step.num_decode_steps
    slots = following_slots(step, block_size)
    decoded = np.empty((len(step.token_ids), count), dtype=np.int32)
    tokens, sampling = step.token_ids, step.sampling
    for index in range(count):
        if index:
            advance(slots[index], step.positions + np.int32(index))
            sampling = replace(sampling, position=step.sampling.position + index)
        tokens = sampler.choose(logits_after(tokens), sampling).numpy()
        decoded[:, index] = tokens
    return StepOutput(
        step.step_id,
        decoded[:, 0],
        np.empty((0, step.probe_top_k), dtype=np.int32),
        np.empty(0, dtype=np.float32),
        decoded=decoded,
    )


def following_slots(step: StepInput, block_size: int) -> Int32:
    """int32 [num_decode_steps, rows]: the KV slots of the rows of each pass."""
    positions = step.positions + np.arange(step.num_decode_steps, dtype=np.int32)[:, None]
    blocks = step.block_tables[np.arange(len(step.positions)), positions // block_size]
    return blocks * np.int32(block_size) + positions % np.int32(block_size)
