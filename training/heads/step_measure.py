"""Measures a training step, for a plan of a run that is not begun."""

from __future__ import annotations

import resource
import time
from typing import NamedTuple

import torch

from .trainer import HeadRun


class StepMeasure(NamedTuple):
    """A step of this process.

    num_texts, num_tokens  of the step, without padding
    states_s    seconds that the target's states took
    training_s  seconds that the network took
    peak_bytes  most memory so far: of the GPU that trains, or of this process where none does
    """

    num_texts: int
    num_tokens: int
    states_s: float
    training_s: float
    peak_bytes: int


def measure_step(run: HeadRun) -> StepMeasure:
    """Train the run's network on the texts of the last step, which has the most passes.

    Twice, of which the second counts: the first may compile or allocate.
    """
    step = run.plan.num_steps - 1
    _train(run, step)
    seconds = _train(run, step)
    lengths = [min(len(text.tokens), run.plan.window) for text in run.texts(step)]
    return StepMeasure(len(lengths), sum(lengths), *seconds, _peak_bytes())


def _train(run: HeadRun, step: int) -> tuple[float, float]:
    """Seconds of the states and of the network."""
    began = time.perf_counter()
    batch, draw = run.launch(step)()
    launched = time.perf_counter()
    run.learn(batch, draw)
    run.update(step)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return launched - began, time.perf_counter() - launched


def _peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # Kibibytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
