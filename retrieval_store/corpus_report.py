"""What became of a corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class CorpusReport:
    """The outcome of `build_corpus`.

    num_read       documents read
    dropped        reason -> documents, perplexity included
    num_kept       documents stored
    num_tokens     tokens stored
    segment_ids    of the segments put in the store
    num_bytes      of these segments together
    perplexities   quantile (0, 0.25, 0.5, 0.75, 1) -> perplexity of all scored documents; empty
                   if nothing was scored
    kept_perplexities  the same of the stored documents
    """

    num_read: int
    dropped: Mapping[str, int]
    num_kept: int
    num_tokens: int
    segment_ids: tuple[str, ...]
    num_bytes: int
    perplexities: Mapping[float, float]
    kept_perplexities: Mapping[float, float]


def quantiles(values: Sequence[float]) -> dict[float, float]:
    """The quantiles of the finite values."""
    finite = [value for value in values if np.isfinite(value)]
    if not finite:
        return {}
    return {
        q: float(value) for q, value in zip(QUANTILES, np.quantile(finite, QUANTILES), strict=True)
    }
