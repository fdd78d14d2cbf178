"""How likely a drafted node is the target's token, learned from every step's outcome."""

from __future__ import annotations

from bisect import bisect_right

# Lower ends of the bins of a drafter's own log-probability; 0 means that it knows none.
LOG_PROB_BINS = (-6.0, -4.0, -3.0, -2.0, -1.4, -0.9, -0.5, -0.2, -0.05)
DEPTH_BINS = (2, 3, 5, 9)
MAX_RANK = 3
# A bin is worth as much as its source's mean until it has seen about so many nodes.
PRIOR_NODES = 8.0
# Beyond this a bin forgets half, so that it follows a change of the texts.
MAX_NODES = 512.0

Cell = tuple[str, int, int, int]


class AcceptanceTable:
    """P(node is accepted | its parent is), by drafter, its log-probability, depth and rank.

    rank is the node's place among its drafter's children of one parent. Estimates are means over
    a bin, drawn towards the drafter's own mean while the bin is young.
    """

    __slots__ = ("_bins", "_cache", "_sources")

    def __init__(self) -> None:
        self._bins: dict[Cell, list[float]] = {}
        self._sources: dict[str, list[float]] = {}
        self._cache: dict[Cell, float] = {}

    def cell(self, source: str, log_prob: float, depth: int, rank: int) -> Cell:
        """The bin of a node; depth is 1 for children of the root, rank 0 for the first child."""
        likely = bisect_right(LOG_PROB_BINS, log_prob) if log_prob < 0 else -1
        return source, likely, bisect_right(DEPTH_BINS, depth), min(rank, MAX_RANK)

    def estimate(self, cell: Cell) -> float:
        """The probability of this bin, above 0 and below 1."""
        known = self._cache.get(cell)
        if known is None:
            known = self._cache[cell] = self._estimate(cell)
        return known

    def judge(self, source: str, log_prob: float, depth: int, rank: int) -> tuple[Cell, float]:
        """The bin of a node and its estimate."""
        cell = self.cell(source, log_prob, depth, rank)
        return cell, self.estimate(cell)

    def record(self, cell: Cell, accepted: bool) -> None:
        """Learn from a node whose parent was accepted."""
        bin_counts = self._bins.setdefault(cell, [0.0, 0.0])
        for counts in (bin_counts, self._sources.setdefault(cell[0], [0.0, 0.0])):
            counts[0] += accepted
            counts[1] += 1
            if counts[1] > MAX_NODES:
                counts[0] /= 2
                counts[1] /= 2
        # Others of the source follow when they learn: its mean moves slowly.
        self._cache.pop(cell, None)

    def _estimate(self, cell: Cell) -> float:
        hits, count = self._sources.get(cell[0], (0.0, 0.0))
        # Half of the nodes, before any was seen: an optimist finds out, a pessimist never does.
        mean = (hits + 1.0) / (count + 2.0)
        hits, count = self._bins.get(cell, (0.0, 0.0))
        return (hits + PRIOR_NODES * mean) / (count + PRIOR_NODES)
