"""The learning rate of a run, by its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

# A warm-up of so many steps is at most this share of a run.
MAX_WARMUP = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Rises in a straight line to the peak, then falls in a line, or as half a cosine.

    warmup        share of the steps in which it rises
    warmup_steps  as many steps in place of a share, but at most a tenth of the run
    """

    peak: float
    final: float = 0.0
    warmup: float = 0.02
    warmup_steps: int | None = None
    is_cosine: bool = False

    def at(self, step: int, num_steps: int) -> float:
        """The rate of a step, from 0."""
        done = (step + 0.5) / num_steps
        warmup = self.warmup
        if self.warmup_steps is not None:
            warmup = min(self.warmup_steps / num_steps, MAX_WARMUP)
        if done < warmup:
            return self.peak * done / warmup
        left = (1 - done) / (1 - warmup)
        if self.is_cosine:
            left = 0.5 - 0.5 * math.cos(math.pi * left)
        return self.final + (self.peak - self.final) * left
