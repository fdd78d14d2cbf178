"""Counts of speculation, from the engine's metrics or from an answer's `metrics` block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ...core.request.output import RequestMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecCounts:
    """Totals of one or more answers.

    num_steps    verification steps
    committed    tokens that they committed, bonus tokens included
    drafted, accepted  nodes by source
    lengths      lengths[n] steps accepted n nodes
    """

    num_steps: int
    committed: int
    drafted: Mapping[str, int]
    accepted: Mapping[str, int]
    lengths: tuple[int, ...]

    @property
    def tau(self) -> float:
        """Mean tokens that a verification step committed; 1 before any."""
        return self.committed / self.num_steps if self.num_steps else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the verified nodes that were accepted."""
        drafted = sum(self.drafted.values())
        return sum(self.accepted.values()) / drafted if drafted else 0.0

    @property
    def by_position(self) -> list[float]:
        """Share of the steps that accepted a node at depth 0, 1, and so on."""
        steps = sum(self.lengths)
        return [sum(self.lengths[depth:]) / steps for depth in range(1, len(self.lengths))]


def from_metrics(metrics: RequestMetrics) -> SpecCounts:
    """Counts of an answer of an engine in this process."""
    histogram = Counter(metrics.accepted_lengths)
    return SpecCounts(
        num_steps=metrics.num_steps,
        committed=metrics.generated_tokens - 1 if metrics.num_steps else 0,
        drafted=dict(metrics.drafted_by_source),
        accepted=dict(metrics.accepted_by_source),
        lengths=tuple(histogram[n] for n in range(max(histogram, default=-1) + 1)),
    )


def from_block(block: Mapping[str, Any]) -> SpecCounts:
    """Counts of `metrics.speculative_decoding` of a draftline server's answer."""
    steps, sources = block["num_spec_steps"], block["by_source"]
    return SpecCounts(
        num_steps=steps,
        committed=round(block["mean_acceptance_length"] * steps),
        drafted={name: counts["num_draft_tokens"] for name, counts in sources.items()},
        accepted={name: counts["num_accepted_tokens"] for name, counts in sources.items()},
        lengths=tuple(block["acceptance_histogram"]),
    )


def from_timings(timings: Mapping[str, Any]) -> SpecCounts | None:
    """Counts of `timings` of an answer of llama.cpp's server; None where it drafted nothing.

    It has no counts of single passes, so `lengths` is empty.
    """
    if not timings.get("draft_n"):
        return None
    accepted, committed = timings["draft_n_accepted"], timings["predicted_n"] - 1
    return SpecCounts(
        num_steps=committed - accepted,
        committed=committed,
        drafted={"draft": timings["draft_n"]},
        accepted={"draft": accepted},
        lengths=(),
    )


def total(counts: Iterable[SpecCounts]) -> SpecCounts:
    """The sum of all counts."""
    parts = list(counts)
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for part in parts:
        drafted.update(part.drafted)
        accepted.update(part.accepted)
    return SpecCounts(
        num_steps=sum(part.num_steps for part in parts),
        committed=sum(part.committed for part in parts),
        drafted=dict(drafted),
        accepted=dict(accepted),
        lengths=tuple(map(sum, zip_longest(*(part.lengths for part in parts), fillvalue=0))),
    )
