"""The outcome of building a corpus."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Number of example documents that are named for each reason.
MAX_EXAMPLES = 5


@dataclass(slots=True)
class DropLog:
    """Counts documents that were dropped by reason, and remembers the first few names of each."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        """Count one more document."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        names = self.examples.setdefault(reason, [])
        if len(names) < MAX_EXAMPLES:
            names.append(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusReport:
    """The outcome of `build_corpus`.

    num_read       documents read
    dropped        reason -> documents, perplexity included
    examples       reason -> names of the first of them
    num_kept       documents stored
    num_tokens     tokens stored
    segment_ids    of the segments put in the store
    num_bytes      of these segments together
    scored         perplexity of every document that was scored; inf where the target had none
    kept_scored    the same of the stored documents
    """

    num_read: int
    dropped: Mapping[str, int]
    examples: Mapping[str, Sequence[str]]
    num_kept: int
    num_tokens: int
    segment_ids: tuple[str, ...]
    num_bytes: int
    scored: tuple[float, ...] = ()
    kept_scored: tuple[float, ...] = ()

    @property
    def perplexities(self) -> dict[float, float]:
        """Quantile (0, 0.25, 0.5, 0.75, 1) -> perplexity; empty if nothing was scored."""
        return quantiles(self.scored)

    @property
    def kept_perplexities(self) -> dict[float, float]:
        """Quantile -> perplexity of the stored documents; empty if nothing was scored."""
        return quantiles(self.kept_scored)

    def fields(self) -> dict[str, Any]:
        """Counts, examples and quantiles by name, for JSON; not each perplexity."""
        return {
            "read": self.num_read,
            "kept": self.num_kept,
            "tokens": self.num_tokens,
            "bytes": self.num_bytes,
            "segments": list(self.segment_ids),
            "dropped": {
                reason: {"documents": count, "examples": list(self.examples[reason])}
                for reason, count in self.dropped.items()
            },
            "scored": len(self.scored),
            "perplexity_quantiles": {str(q): value for q, value in self.perplexities.items()},
            "kept_perplexity_quantiles": {
                str(q): value for q, value in self.kept_perplexities.items()
            },
        }


def quantiles(values: Sequence[float]) -> dict[float, float]:
    """The quantiles of the finite values."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return {}
    return {
        q: float(value) for q, value in zip(QUANTILES, np.quantile(finite, QUANTILES), strict=True)
    }
