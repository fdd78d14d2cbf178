"""Draws from the law of a model's most probable tokens, which it can declare whole."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...core.draft_laws import DraftLaws
from ...core.types import Float32, Int32, StepOutput


class DraftLaw(NamedTuple):
    """ids int32 [k] and probs float32 [k] that one token was drawn from."""

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
) -> tuple[int, float, DraftLaw]:
    """A token after `row`, drawn among the `size` most probable ones.

    With it come its log-probability and the law.
    """
    assert output.top is not None
    ids, log_probs = output.top.ids[row, :size], output.top.log_probs[row, :size]
    weights = np.exp((log_probs - log_probs.max()).astype(np.float64) / temperature)
    # What is declared is what is drawn from, rounding included.
    law = (weights / weights.sum()).astype(np.float32)
    sums = np.cumsum(law, dtype=np.float64)
    place = int(np.searchsorted(sums, rng.random() * sums[-1], side="right"))
    place = min(place, int(np.flatnonzero(law)[-1]))
    return int(ids[place]), float(np.log(law[place])), DraftLaw(ids, law)


def stacked(laws: Sequence[DraftLaw]) -> DraftLaws | None:
    """The laws of a chain; None without any."""
    if not laws:
        return None
    return DraftLaws(
        np.stack([law.ids for law in laws]).astype(np.int32),
        np.stack([law.probs for law in laws]),
    )
