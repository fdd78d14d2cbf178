"""Whether a cache of 8 bits has one scale for all, or one for every row."""

from __future__ import annotations

from torch import Tensor


def are_by_row(scales: Tensor | None) -> bool:
    """Whether every row of the cache has scales of its own."""
    return scales is not None and scales.ndim == 3
