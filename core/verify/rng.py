"""Random numbers of verification rules, repeatable for a request.

See docs/algorithms/verification.md.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Float64


class SeededRng:
    """A random stream that depends on the request's seed and on a position alone.

    It is not the sampling noise of `core/sampling/noise.py`: drafters may draw with that, and the
    tests of their tokens must not depend on what they drew.
    """

    __slots__ = ("_rng",)

    def __init__(self, seed: int, position: int) -> None:
        key = np.array([seed, position], dtype=np.int64).view(np.uint64)
        self._rng = np.random.Generator(np.random.Philox(key=key))

    def accepts(self, probability: float) -> bool:
        """See `Rng`."""
        return self.uniform() < probability

    def uniforms(self, count: int) -> Float64:
        """The next `count` uniform numbers: one for each test, and one for each draw."""
        return self._rng.random(count)

    def uniform(self) -> float:
        """The next uniform number."""
        return self._rng.random()

    def draw(self, distribution: Float64) -> int:
        """See `Rng`."""
        sums = np.cumsum(distribution)
        place = np.searchsorted(sums, self.uniform() * sums[-1], side="right")
        # Rounding must not choose a token behind the last possible one.
        return int(min(place, np.flatnonzero(distribution)[-1]))
