"""Seconds of a step by its number of rows: a measured curve.

See docs/algorithms/token_trees.md, "Node budget".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..arrays import Float64

# Rows at which the curve is kept.
GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
# Weight of a new measurement.
WEIGHT = 0.1
# One step that took so many times longer than expected tells of the machine, not of its rows.
OUTLIER = 3.0


class StepCost:
    """step time = f(rows), piecewise linear over a grid, never falling, and learning."""

    __slots__ = ("_curve", "_grid", "_is_stale", "_seconds")

    def __init__(self, rows: list[int], seconds: list[float]) -> None:
        """Begin with measurements at some numbers of rows, at least one; `rows` rises."""
        assert rows
        self._grid = np.array(GRID, dtype=np.float64)
        self._seconds = np.interp(self._grid, rows, seconds)
        if len(rows) > 1:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]))
            beyond = self._grid > rows[-1]
            self._seconds[beyond] = seconds[-1] + slope * (self._grid[beyond] - rows[-1])
        self._is_stale = True
        self._curve = self._seconds

    def seconds(self, rows: npt.ArrayLike) -> Float64:
        """Expected seconds of steps with so many rows, in the shape of `rows`."""
        if self._is_stale:
            # Noise must not make more rows seem cheaper than fewer.
            rising = np.maximum.accumulate(self._seconds)
            falling = np.minimum.accumulate(self._seconds[::-1])[::-1]
            self._curve = (rising + falling) / 2
            self._is_stale = False
        return np.asarray(np.interp(np.asarray(rows), self._grid, self._curve))

    def record(self, rows: int, seconds: float) -> None:
        """Learn that a step of `rows` rows took `seconds`."""
        expected = float(self.seconds(rows))
        error = min(seconds, OUTLIER * expected) - expected
        right = int(np.searchsorted(self._grid, rows))
        left = max(0, right - 1)
        right = min(right, len(self._grid) - 1)
        span = self._grid[right] - self._grid[left]
        share = 1.0 if span == 0 else float(np.clip((rows - self._grid[left]) / span, 0, 1))
        self._seconds[left] += WEIGHT * (1 - share) * error
        self._seconds[right] += WEIGHT * share * error
        self._is_stale = True
