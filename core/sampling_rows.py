"""The sampling parameters of some requests, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .shaping import Shaping
from .types import Float32, Int32, Int64, SamplingRows


def sampling_rows(
    temperatures: Sequence[float],
    shapings: Sequence[Shaping],
    seeds: Sequence[int],
    positions: Int64,
    counts: Sequence[int] | Int32 | None = None,
) -> SamplingRows:
    """Rows of some requests, `counts` of each; by default one. `positions` is int64 [rows]."""
    counts = [1] * len(shapings) if counts is None else counts

    def floats(values: Sequence[float]) -> Float32:
        return np.repeat(np.array(values, dtype=np.float32), counts)

    return SamplingRows(
        temperature=floats(temperatures),
        top_k=np.repeat(np.array([s.top_k for s in shapings], dtype=np.int32), counts),
        top_p=floats([s.top_p for s in shapings]),
        min_p=floats([s.min_p for s in shapings]),
        typical_p=floats([s.typical_p for s in shapings]),
        seed=np.repeat(np.array(seeds, dtype=np.int64), counts),
        position=positions,
    )
