"""What time and rows are worth in a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...arrays import Float64

# Rows over which their price is looked at.
FIRST_NODES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """What time and rows are worth in a step.

    token_s    seconds that an accepted token saves, of late
    plain_s    seconds of a token in plain decoding
    round_s    seconds of plain decoding for a token of each request
    grid       float64 [n]  numbers of rows, rising
    curve_s    float64 [n]  seconds of the round with so many
    base_rows  of the step without any nodes
    host_s     seconds of the host's own work for a step with drafts, and for each of its requests
    single_s   that a step of one token each takes longer than plain decoding, which may decode more
    """

    token_s: float
    plain_s: float
    round_s: float
    grid: Float64
    curve_s: Float64
    base_rows: float
    host_s: tuple[float, float] = (0.0, 0.0)
    single_s: float = 0.0

    @property
    def first_row_s(self) -> float:
        """What each of the first rows beyond those of the step takes."""
        rows = self.base_rows, self.base_rows + FIRST_NODES
        before, after = np.interp(rows, self.grid, self.curve_s)
        return float(after - before) / FIRST_NODES
