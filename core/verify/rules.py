"""The acceptance rules by name, and the random numbers that they decide by.

See docs/how-it-works.md, "Other rules".
"""

from __future__ import annotations

import numpy as np

from ..arrays import Float64

# Sample-and-match, which needs no rule: the target's own tokens are walked along the tree.
COUPLED = "coupled"
# The last stage decides, beside the logits (`models/verify/`).
REJECTION, TYPICAL = "rejection", "typical"
# Texts do not have the target's distribution under these.
LOSSY = frozenset({TYPICAL})


class SeededRng:
    """A random stream that depends on the request's seed and on a position alone.

    It is not the sampling noise of `core/sampling/noise.py`: drafters may draw with that, and the
    tests of their tokens must not depend on what they drew.
    """

    __slots__ = ("_rng",)

    def __init__(self, seed: int, position: int) -> None:
        key = np.array([seed, position], dtype=np.int64).view(np.uint64)
        self._rng = np.random.Generator(np.random.Philox(key=key))

    def uniforms(self, count: int) -> Float64:
        """The next `count` uniform numbers: one for each test, and one for each draw."""
        return self._rng.random(count)

    def uniform(self) -> float:
        """The next uniform number."""
        return self._rng.random()
