"""How often a streamed tree is left where a slice of it is answered.

Heads of the last stage draft behind every slice that says more of the text, before it is known
whether the text goes on in slices behind it: drafts are of use behind a miss alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Float64
from ..reach import NUM_REACHES

# What one more run leaves of the weight of those before it.
DECAY = 0.98
# Of answers at leaves, those that must have ended a run for heads to draft there.
LEAF_SHARE = 0.5


class Misses:
    """Counts of the runs of late: a run begins where nothing of a request's tree is on its way, and
    ends where that is so again, with a miss or because drafts end."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        # Answers of each reach, and those that a run ended with, first those that were not at
        # leaves.
        self._sums: Float64 = np.zeros((2, NUM_REACHES, 2))

    def note(self, outcomes: Sequence[tuple[int, bool]]) -> None:
        """A run is over.

        outcomes  of the answers to its slices, one at least: their reaches (`core/reach.py`), and
                  whether the text came to a leaf
        """
        self._sums *= DECAY
        for reach, at_leaf in outcomes:
            self._sums[int(at_leaf), reach, 0] += 1.0
        reach, at_leaf = outcomes[-1]
        self._sums[int(at_leaf), reach, 1] += 1.0

    @property
    def at_leaves(self) -> bool:
        """Whether heads draft behind leaves: most runs that came to one ended there."""
        answers, ended = self._sums[1].sum(axis=0)
        return bool(ended + 1.0 >= LEAF_SHARE * (answers + 1.0))

    @property
    def shares(self) -> Float64:
        """float64 [reaches]: of answers of each reach behind which heads draft, those that end a
        run, above 0; 1 where none is known."""
        drafted = self._sums.sum(axis=0) if self.at_leaves else self._sums[0]
        return (drafted[:, 1] + 1.0) / (drafted[:, 0] + 1.0)
