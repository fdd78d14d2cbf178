"""What slices bring a request: how long it goes on in them, and how far it comes.

A run begins where nothing of a request's tree is on its way and ends where that is so again: with a
miss, or because drafts end. Heads of the last stage draft for whole trees alone, so what they bring
in a round is worth less by what a run would have.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Float64
from ..reach import NUM_REACHES
from ..tree.streamed_tree import SlicedRun

# What one more run leaves of the weight of those before it.
DECAY = 0.98


class SlicedRuns:
    """Means of the runs of late, by the reach of the step before them."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        # Runs, their seconds, and their tokens.
        self._sums: Float64 = np.zeros((NUM_REACHES, 3))

    def note(self, run: SlicedRun, num_tokens: int, now: float) -> None:
        """A run is over; the text has so many tokens now."""
        own = self._sums[run.reach]
        own *= DECAY
        own += 1.0, now - run.began_at, num_tokens - run.num_tokens

    @property
    def means(self) -> Float64:
        """float64 [reaches, 2]: seconds and tokens of a run; zeros where none is known."""
        return self._sums[:, 1:] / np.maximum(self._sums[:, :1], 1.0)
