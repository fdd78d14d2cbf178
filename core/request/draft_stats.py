"""How many nodes of each drafter were verified and committed, for all requests of an engine.

Arrays by request and drafter, since every step adds to those of all its requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..arrays import Int32, Int64
from ..compiled import compiled
from ..tree.tree import TreeBatch
from ..tree.tree_loops import SOURCE

FIRST_ROWS = 64


class NodeTotals(NamedTuple):
    """Nodes by the drafter that proposed them first; none of drafters without any."""

    drafted: Counter[str]
    accepted: Counter[str]

    @property
    def wasted(self) -> Counter[str]:
        """Nodes that were verified and not committed."""
        return self.drafted - self.accepted


class DraftStats:
    """Counts for all requests; each has a row until it ends."""

    __slots__ = ("_counts", "_free", "_names")

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        # Drafted and accepted nodes. Row 0 takes what still comes of requests that have ended.
        self._counts = np.zeros((2, 1, 0), dtype=np.int64)
        self._free: list[int] = []

    def open(self) -> TalliedNodes:
        """The nodes of a new request."""
        if not self._free:
            old = self._counts.shape[1]
            new = max(FIRST_ROWS, 2 * old)
            self._grow(new, self._counts.shape[2])
            self._free = list(range(new - 1, old - 1, -1))
        row = self._free.pop()
        self._counts[:, row] = 0
        return TalliedNodes(self, row)

    def close(self, row: int) -> None:
        """Give a row back."""
        self._free.append(row)

    def add(
        self, rows: Sequence[int], trees: TreeBatch, sources: Int32, source_ends: Int64
    ) -> None:
        """Count a step: its trees, and the sources of what was committed of each.

        The trees' drafters are those known already and others behind them, or the first of these.
        Sources are int32, below 0 for what is no node's; `source_ends` is int64 [trees].
        """
        if len(trees.names) > len(self._names):
            self._names = trees.names
            self._grow(self._counts.shape[1], len(self._names))
        row_ids = np.array(rows, dtype=np.int64)
        add_nodes(self._counts, row_ids, trees.nodes, trees.node_ends, sources, source_ends)

    def take_back(self, row: int, sources: Iterable[str]) -> None:
        """Nodes that were accepted stand behind the answer's end."""
        for source in sources:
            self._counts[1, row, self._names.index(source)] -= 1

    def totals(self, row: int) -> NodeTotals:
        """What was counted for a request."""
        drafted, accepted = (
            Counter({name: count for name, count in zip(self._names, counts, strict=True) if count})
            for counts in self._counts[:, row].tolist()
        )
        return NodeTotals(drafted, accepted)

    def _grow(self, num_rows: int, num_names: int) -> None:
        counts = np.zeros((2, num_rows, num_names), dtype=np.int64)
        counts[:, : self._counts.shape[1], : self._counts.shape[2]] = self._counts
        self._counts = counts


@compiled
def add_nodes(
    counts: Int64,
    rows: Int64,
    nodes: Int32,
    node_ends: Int64,
    sources: Int32,
    source_ends: Int64,
) -> None:
    """Count the nodes of each tree, and those on its path; see `DraftStats.add`."""
    node, place = 0, 0
    for tree in range(len(rows)):
        while node < node_ends[tree]:
            counts[0, rows[tree], nodes[node, SOURCE]] += 1
            node += 1
        while place < source_ends[tree]:
            if sources[place] >= 0:
                counts[1, rows[tree], sources[place]] += 1
            place += 1


class TalliedNodes:
    """The nodes of one request: a row of the stats, and after its end what stood there."""

    __slots__ = ("_final", "_stats", "row")

    def __init__(self, stats: DraftStats, row: int) -> None:
        self.row = row
        self._stats = stats
        self._final: NodeTotals | None = None

    @property
    def totals(self) -> NodeTotals:
        """What was counted."""
        return self._stats.totals(self.row) if self._final is None else self._final

    def take_back(self, sources: Iterable[str]) -> None:
        """Nodes that were accepted stand behind the answer's end."""
        self._stats.take_back(self.row, sources)

    def close(self) -> None:
        """The request has ended: what comes after is not counted."""
        self._final = self.totals
        self._stats.close(self.row)
        self.row = 0
