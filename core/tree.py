"""The token tree of one request: all drafters' proposals merged by prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .acceptance import AcceptanceTable, Cell
from .types import ROOT, Bool, Float64, Int32, Proposal


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """Merged nodes in topological order; node i is row i + 1 of the request's step, root is row 0.

    tokens   int32 [n]
    parents  int32 [n]  -1 is the root (the last committed token)
    depths   int32 [n]  1 for children of the root
    sources  n names: the drafter that proposed the node first
    children (parent, token) -> node; siblings never share a token
    values   float64 [n]  probability that the target's path goes through the node; never above
                          its parent's
    cells    n tuples: what an `AcceptanceTable` learns from the node, one cell a drafter of it
    """

    tokens: Int32
    parents: Int32
    depths: Int32
    sources: tuple[str, ...]
    children: dict[tuple[int, int], int]
    values: Float64
    cells: tuple[tuple[Cell, ...], ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def mask(self) -> Bool:
        """bool [n + 1, n + 1]: row i sees row j; row 0 is the root, and every row sees itself."""
        size = len(self) + 1
        # Whole numbers as bit sets: a numpy operation a node would take most of a step's time.
        rows = [1]
        for node, parent in enumerate(self.parents.tolist()):
            rows.append(rows[parent + 1] | (2 << node))
        width = (size + 7) // 8
        packed = b"".join([row.to_bytes(width, "little") for row in rows])
        bits = np.frombuffer(packed, dtype=np.uint8).reshape(size, width)
        return np.unpackbits(bits, axis=1, count=size, bitorder="little").view(np.bool_)

    def keep(self, kept: Bool) -> TokenTree:
        """The tree of these nodes; the parent of each must be among them. `kept` is bool [n]."""
        if kept.all():
            return self
        nodes = np.flatnonzero(kept)
        new_index = np.full(len(self) + 1, ROOT, dtype=np.int32)
        new_index[nodes] = np.arange(len(nodes), dtype=np.int32)
        parents = new_index[self.parents[nodes]]
        pairs = zip(parents.tolist(), self.tokens[nodes].tolist(), strict=True)
        return TokenTree(
            self.tokens[nodes],
            parents,
            self.depths[nodes],
            tuple(self.sources[node] for node in nodes),
            {pair: node for node, pair in enumerate(pairs)},
            self.values[nodes],
            tuple(self.cells[node] for node in nodes),
        )

    def learn(self, table: AcceptanceTable, path_tokens: Sequence[int]) -> None:
        """Tell `table` which nodes were right, for the target's own tokens after the root.

        Only nodes below what the target said are judged; the others' parents were wrong.
        """
        said: dict[int, int] = {}
        node: int | None = ROOT
        for token in path_tokens:
            said[node] = token
            node = self.children.get((node, token))
            if node is None:
                break
        judged = zip(self.parents.tolist(), self.tokens.tolist(), self.cells, strict=True)
        for parent, token, cells in judged:
            if parent in said:
                for cell in cells:
                    table.record(cell, said[parent] == token)

    def check(self) -> None:
        """Assert the invariants above."""
        count = len(self)
        assert self.parents.shape == self.depths.shape == (count,) == (len(self.sources),)
        assert np.all((self.parents >= ROOT) & (self.parents < np.arange(count)))
        above = np.where(self.parents == ROOT, 0, self.depths[self.parents])
        assert np.array_equal(self.depths, above + 1)
        pairs = list(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))
        assert self.children == {pair: node for node, pair in enumerate(pairs)}
        assert len(self.children) == count == len(self.values) == len(self.cells)
        limits = np.where(self.parents == ROOT, 1.0, self.values[self.parents])
        assert np.all(self.values <= limits)


def merge(
    proposals: Sequence[Proposal],
    max_nodes: int,
    max_depth: int,
    table: AcceptanceTable | None = None,
) -> TokenTree:
    """Merge proposals by prefix, in order of priority, under a node budget.

    Earlier proposals buy their nodes first, so that internal guesses come before external ones
    (SPECTRA, Algorithm 1). A node that is already there costs nothing. What exceeds `max_nodes`
    or `max_depth` is cut, with its descendants. `table` judges the nodes; without it all are worth
    the same.
    """
    growing = _Growing(max_nodes, max_depth, table)
    for proposal in proposals:
        growing.add(proposal)
    return growing.tree()


class _Growing:
    """A tree while proposals are merged into it."""

    __slots__ = (
        "cells", "children", "depths", "max_depth", "max_nodes", "parents", "sources", "table",
        "tokens", "values",
    )  # fmt: skip

    def __init__(self, max_nodes: int, max_depth: int, table: AcceptanceTable | None) -> None:
        self.max_nodes, self.max_depth, self.table = max_nodes, max_depth, table
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.sources: list[str] = []
        self.values: list[float] = []
        self.cells: list[tuple[Cell, ...]] = []
        self.children: dict[tuple[int, int], int] = {}

    def add(self, proposal: Proposal) -> None:
        """Merge one proposal. Of several drafters that propose a node, the surest judges it."""
        # One loop without calls: this runs for every node of every request in every step.
        table, source, children = self.table, proposal.source, self.children
        depths, values, cells = self.depths, self.values, self.cells
        # merged[i]: the tree node that the proposal's node i became; None where it was cut.
        merged: list[int | None] = []
        ranks = [0] * (len(proposal.tokens) + 1)
        log_probs = proposal.log_probs.tolist()
        nodes = zip(proposal.tokens.tolist(), proposal.parents.tolist(), log_probs, strict=True)
        for token, own_parent, log_prob in nodes:
            rank = ranks[own_parent]
            ranks[own_parent] = rank + 1
            parent, depth, above = ROOT, 1, 1.0
            if own_parent != ROOT:
                placed = merged[own_parent]
                if placed is None:
                    merged.append(None)
                    continue
                parent, depth, above = placed, depths[placed] + 1, values[placed]
            node = children.get((parent, token))
            if node is None:
                node = len(depths)
                if node >= self.max_nodes or depth > self.max_depth:
                    merged.append(None)
                    continue
                children[parent, token] = node
                self.tokens.append(token)
                self.parents.append(parent)
                self.sources.append(source)
                depths.append(depth)
                values.append(1.0 if table is None else 0.0)
                cells.append(())
            merged.append(node)
            if table is not None:
                cell, rate = table.judge(source, log_prob, depth, rank)
                cells[node] += (cell,)
                values[node] = max(values[node], rate * above)

    def tree(self) -> TokenTree:
        """What was merged."""
        return TokenTree(
            np.array(self.tokens, dtype=np.int32),
            np.array(self.parents, dtype=np.int32),
            np.array(self.depths, dtype=np.int32),
            tuple(self.sources),
            self.children,
            np.array(self.values, dtype=np.float64),
            tuple(self.cells),
        )


NO_TREE = merge((), 0, 0)
