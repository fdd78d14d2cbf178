"""Compiles the loops of both ends, so that no step waits for that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ....core.steps import LogitEdits, Penalties, prompt_step
from .step_decoder import StepDecoder
from .step_encoder import StepEncoder


def load_loops() -> None:
    """Compile the loops over what is kept, or load them: a step there and back does."""
    step = prompt_step(2, 1)
    ids, zeros = step.logits_rows, np.zeros(2, dtype=np.float32)
    penalties = Penalties(ids, ids, ids > 0, ids, ids, 1.0, 0.5, 0.5)
    mask = np.ones((2, 2), dtype=np.uint32)
    step = replace(step, edits=(LogitEdits(0, 2, ids, zeros, penalties, mask),))
    encoder, decoder = StepEncoder(0), StepDecoder()
    for _ in range(2):
        decoder.decode(encoder.encode(step))
