"""The sampling parameters of some requests, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Int32, Int64
from ..logits_params import LogitsParams
from ..steps import SamplingRows


def sampling_rows(
    temperatures: Sequence[float],
    shapings: Sequence[LogitsParams],
    seeds: Sequence[int],
    positions: Int64,
    counts: Sequence[int] | Int32 | None = None,
) -> SamplingRows:
    """Rows of some requests, `counts` of each; by default one. `positions` is int64 [rows]."""
    floats = np.array([temperatures, *_columns(shapings)], dtype=np.float32)
    whole = np.array([[logits_params.top_k for logits_params in shapings], seeds], dtype=np.int64)
    if counts is not None:
        floats, whole = floats.repeat(counts, axis=1), whole.repeat(counts, axis=1)
    return SamplingRows(
        temperature=floats[0],
        top_k=whole[0].astype(np.int32),
        top_p=floats[1],
        min_p=floats[2],
        typical_p=floats[3],
        seed=whole[1],
        position=positions,
    )


def _columns(shapings: Sequence[LogitsParams]) -> list[list[float]]:
    return [
        [logits_params.top_p for logits_params in shapings],
        [logits_params.min_p for logits_params in shapings],
        [logits_params.typical_p for logits_params in shapings],
    ]
