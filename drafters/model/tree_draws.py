"""Siblings of a tree that are drawn from the model's distribution, which is declared.

Draws are without replacement, as Sequoia's (Chen et al., arXiv 2402.12374). The order of the tests
is that of the draws. See docs/drafters.md, "Model trees".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.steps import StepOutput
from .text_distribution import DraftDistribution, draw_index, weights_of

AUTO, NO_DRAWS = "auto", "none"
DRAWS = (AUTO, NO_DRAWS)


@dataclass(frozen=True, slots=True)
class TreeDraws:
    """How the candidates after a node are drawn.

    size  draws are among so many of the most probable tokens
    """

    size: int
    temperature: float
    rng: np.random.Generator

    def candidates(self, output: StepOutput, row: int, count: int) -> list[DrawnToken]:
        """`count` draws after `row`, in their order; fewer where no further token can be drawn."""
        top = output.log_probs.top
        assert top is not None
        ids, log_probs = top.ids[row, : self.size], top.log_probs[row, : self.size]
        weights = weights_of(log_probs, self.temperature)
        drawn: list[DrawnToken] = []
        while len(drawn) < count and weights.any():
            index, probs = draw_index(weights, self.rng)
            drawn.append(
                DrawnToken(
                    int(ids[index]), float(np.log(probs[index])), DraftDistribution(ids, probs)
                )
            )
            weights[index] = 0.0
        return drawn


@dataclass(frozen=True, slots=True, eq=False)
class DrawnToken:
    """A candidate, its log-probability, and the distribution that it was drawn from, given the
    draws before it."""

    token: int
    log_prob: float
    distribution: DraftDistribution
