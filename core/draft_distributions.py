"""What drafts were drawn from, for acceptance rules that look at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .arrays import Float32, Int32
from .errors import ProtocolError

# Probabilities are float32.
DISTRIBUTION_SLACK = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class DraftDistributions:
    """What the nodes of a proposal were drawn from, each given all that was drawn before it.

    ids    int32 [n, k]  the only tokens that could be drawn
    probs  float32 [n, k]  of these; they add up to 1. A row of zeros: the node is no draw, but a
           function of the past
    """

    ids: Int32
    probs: Float32

    def rows(self, places: Sequence[int] | slice) -> DraftDistributions:
        """The distributions of the nodes at `places`."""
        return DraftDistributions(self.ids[places], self.probs[places])

    def check(self, tokens: Int32, vocab_size: int) -> None:
        """Raise `ProtocolError` unless these tokens can have been drawn so."""
        if self.ids.ndim != 2 or self.ids.shape != self.probs.shape:
            raise ProtocolError("distributions: arrays differ in shape")
        if len(self.ids) != len(tokens) or self.ids.shape[1] > vocab_size:
            raise ProtocolError("distributions: not a row for each node, or rows too long")
        if self.ids.dtype != np.int32 or self.probs.dtype != np.float32:
            raise ProtocolError("distributions: ids must be int32 and probabilities float32")
        if not ((self.ids >= 0) & (self.ids < vocab_size)).all():
            raise ProtocolError("distributions: a token id is outside the vocabulary")
        sums = self.probs.sum(axis=1, dtype=np.float64)
        is_draw = self.probs.any(axis=1)
        # A NaN fails every comparison.
        if not (self.probs >= 0).all() or not (abs(sums[is_draw] - 1) < DISTRIBUTION_SLACK).all():
            raise ProtocolError("distributions: probabilities do not add up to 1")
        drawn = np.where(self.ids == tokens[:, None], self.probs, 0.0).sum(axis=1)
        if not (drawn[is_draw] > 0).all():
            raise ProtocolError("distributions: a token was drawn that its distribution excludes")
