"""Draws from the distribution of a model's most probable tokens, which it can declare whole."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...core.arrays import Float32, Int32
from ...core.proposals import DraftDistributions
from ...core.steps import StepOutput


class DraftDistribution(NamedTuple):
    """The distribution that one token was drawn from: ids int32 [k] and probs float32 [k]."""

    ids: Int32
    probs: Float32


def draft_rng(name: str, seed: int, committed_len: int) -> np.random.Generator:
    """Random numbers for one draft of one drafter.

    What two drafters draw must not depend on each other, and what one draws must not depend on
    its drafts before, by whose fate the text went on: so neither may use the sampling noise.
    """
    return np.random.default_rng([seed, committed_len, zlib.crc32(name.encode())])


def draw(
    output: StepOutput, row: int, size: int, temperature: float, rng: np.random.Generator
) -> tuple[int, float, DraftDistribution]:
    """A token after `row`, drawn among the `size` most probable ones.

    With it come its log-probability and the distribution.
    """
    assert output.top is not None
    ids, log_probs = output.top.ids[row, :size], output.top.log_probs[row, :size]
    weights = np.exp((log_probs - log_probs.max()).astype(np.float64) / temperature)
    # What is declared is what is drawn from, rounding included.
    distribution = (weights / weights.sum()).astype(np.float32)
    sums = np.cumsum(distribution, dtype=np.float64)
    index = int(np.searchsorted(sums, rng.random() * sums[-1], side="right"))
    index = min(index, int(np.flatnonzero(distribution)[-1]))
    return int(ids[index]), float(np.log(distribution[index])), DraftDistribution(ids, distribution)


def stacked(distributions: Sequence[DraftDistribution]) -> DraftDistributions | None:
    """The distributions of a chain; None without any."""
    if not distributions:
        return None
    return DraftDistributions(
        np.stack([distribution.ids for distribution in distributions]).astype(np.int32),
        np.stack([distribution.probs for distribution in distributions]),
    )
