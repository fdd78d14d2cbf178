"""Probability that a drafted node is the target's token, learned from every step's outcome.

Formula: docs/how-it-works.md, "Acceptance estimates".
"""

from __future__ import annotations

import numpy as np

from ..arrays import Float64
from ..compiled import compiled

# Lower ends of the bins of a drafter's own log-probability; 0 means that it knows none.
LOG_PROB_BINS = (-6.0, -4.0, -3.0, -2.0, -1.4, -0.9, -0.5, -0.2, -0.05)
DEPTH_BINS = (2, 3, 5, 9)
MAX_RANK = 3
# A bin is worth as much as its source's mean until it has seen about so many nodes.
PRIOR_NODES = 8.0
# Beyond this a bin forgets half, so that it follows a change of the texts.
MAX_NODES = 128.0

# What a drafter calls less probable is as good as this; what it calls certain, as this.
LEAST_STATED, MOST_LIKELY = 1e-6, 0.999
# Columns of the counts.
ACCEPTED, JUDGED, STATED = range(3)

_RANKS = MAX_RANK + 1
_DEPTHS = len(DEPTH_BINS) + 1
NUM_BINS = (len(LOG_PROB_BINS) + 2) * _DEPTHS * _RANKS


class AcceptanceTable:
    """P(node is accepted | its parent is), by drafter, its log-probability, depth and rank.

    depth is that in the drafter's proposal, 1 for children of its root; rank counts the
    earlier children of the same parent in it. An estimate is the drafter's own probability,
    corrected by the nodes of its bin and, while that is young, of the drafter.

    names   drafters; their indices are their ids
    counts  float64 [drafters, bins + 1, 3]: accepted and judged nodes of each bin, and the sum of
            their own probabilities; the last row holds the sums over all bins
    """

    __slots__ = ("_ids", "counts", "names")

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self.names: tuple[str, ...] = ()
        self.counts: Float64 = np.zeros((0, NUM_BINS + 1, 3))

    def source_id(self, name: str) -> int:
        """The id of a drafter, which is new if it has none."""
        source_id = self._ids.get(name)
        if source_id is None:
            source_id = self._ids[name] = len(self.names)
            self.names = (*self.names, name)
            self.counts = np.concatenate([self.counts, np.zeros((1, NUM_BINS + 1, 3))])
        return source_id

    def estimate(self, source: str, log_prob: float, depth: int, rank: int) -> float:
        """The probability of such a node, above 0 and below 1."""
        source_id = self.source_id(source)
        return float(estimate(self.counts, source_id, log_prob, depth, rank))

    def record(
        self, source: str, log_prob: float, depth: int, rank: int, *, accepted: bool
    ) -> None:
        """Learn from a node whose parent was accepted."""
        source_id = self.source_id(source)
        record(self.counts, source_id, log_prob, depth, rank, accepted)


@compiled
def bin_of(log_prob: float, depth: int, rank: int) -> int:
    """The bin of a node."""
    likely = 0
    if log_prob < 0:
        likely = 1
        for bound in LOG_PROB_BINS:
            likely += log_prob >= bound
    deep = 0
    for bound in DEPTH_BINS:
        deep += depth >= bound
    return (likely * _DEPTHS + deep) * _RANKS + min(rank, MAX_RANK)


@compiled
def own_probability(log_prob: float) -> float:
    """The drafter's own probability of a node, above 0 also where the logarithm is -infinity."""
    return min(max(float(np.exp(log_prob)), LEAST_STATED), 1.0)


@compiled
def estimate(counts: Float64, source: int, log_prob: float, depth: int, rank: int) -> float:
    """The node's own probability, corrected by what became of others of its bin."""
    total, own = counts[source, NUM_BINS], counts[source, bin_of(log_prob, depth, rank)]
    stated = own_probability(log_prob)
    # Before any was seen: what the drafter says, and half where it says nothing. An optimist finds
    # out, a pessimist never does.
    ratio = (total[ACCEPTED] + 1.0) / (total[STATED] + (1.0 if log_prob < 0 else 2.0))
    mean_stated = (own[STATED] + PRIOR_NODES * stated) / (own[JUDGED] + PRIOR_NODES)
    mean = (own[ACCEPTED] + PRIOR_NODES * ratio * mean_stated) / (own[JUDGED] + PRIOR_NODES)
    return min(mean * stated / mean_stated, MOST_LIKELY)


@compiled
def record(
    counts: Float64, source: int, log_prob: float, depth: int, rank: int, accepted: bool
) -> None:
    """Count a node in its bin and in its drafter's total."""
    for row in (counts[source, bin_of(log_prob, depth, rank)], counts[source, NUM_BINS]):
        row[ACCEPTED] += accepted
        row[JUDGED] += 1.0
        row[STATED] += own_probability(log_prob)
        if row[JUDGED] > MAX_NODES:
            row[:] = row / 2.0
