"""Token trees: all drafters' proposals merged by prefix, of one request and of a whole step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from ..arrays import ROOT, Bool, Float32, Float64, Int32, Int64, UInt64, lengths_of
from . import tree_loops
from .tree_loops import unpack


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """Merged nodes in topological order; node i is row i + 1 of the request's step, root is row 0.

    Siblings never share a token.

    nodes                  int32 [n, 4]  tokens, parents, depths and sources, as below
    values                 float64 [n]   probability that the target's path goes through the node;
                           never above its parent's
    attributions           int32 [m, 4]  one for each drafter that proposed a node: node, drafter,
                           its place among that drafter's children of the parent, and its depth in
                           what the drafter proposed
    attribution_log_probs  float32 [m]  what these drafters gave
    names                  drafters; their places are the ids above
    """

    nodes: Int32
    values: Float64
    attributions: Int32
    attribution_log_probs: Float32
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def tokens(self) -> Int32:
        """Token ids, int32 [n]."""
        return self.nodes[:, 0]

    @property
    def parents(self) -> Int32:
        """Indices of the parents, int32 [n]; -1 is the root, the last committed token."""
        return self.nodes[:, 1]

    @property
    def depths(self) -> Int32:
        """Depths, int32 [n]; 1 for children of the root."""
        return self.nodes[:, 2]

    @property
    def sources(self) -> Int32:
        """Ids of the drafters that proposed each node first, int32 [n]."""
        return self.nodes[:, 3]

    def count_sources(self) -> dict[str, int]:
        """How many nodes each drafter proposed first; nothing of those with none."""
        (counts,) = TreeBatch.of([self]).count_sources()
        return counts

    def mask(self) -> Bool:
        """bool [n + 1, n + 1]: row i sees row j; row 0 is the root, and every row sees itself."""
        return unpack(self.ancestors(), len(self) + 1)

    def ancestors(self) -> UInt64:
        """The mask in bits, as `core/tree/tree_loops.py` packs it."""
        ends = np.array([len(self)], dtype=np.int64)
        return tree_loops.ancestor_bits(self.nodes, ends).reshape(len(self) + 1, -1)

    def keep(self, kept: Bool) -> TokenTree:
        """The tree of these nodes; the parent of each must be among them. `kept` is bool [n]."""
        (tree,) = TreeBatch.of([self]).keep(kept)
        return tree

    def check(self) -> None:
        """Assert the invariants above."""
        count, num_attributions = len(self), len(self.attribution_log_probs)
        assert self.nodes.shape == (count, 4)
        assert self.attributions.shape == (num_attributions, 4)
        assert np.all((self.parents >= ROOT) & (self.parents < np.arange(count)))
        above = np.where(self.parents == ROOT, 0, self.depths[self.parents])
        assert np.array_equal(self.depths, above + 1)
        assert len(set(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))) == count
        limits = np.where(self.parents == ROOT, 1.0, self.values[self.parents])
        assert np.all(self.values <= limits)
        firsts: dict[int, int] = dict(self.attributions[::-1, :2].tolist())
        assert [firsts[node] for node in range(count)] == self.sources.tolist()


@dataclass(frozen=True, slots=True, eq=False)
class TreeBatch(Sequence[TokenTree]):
    """The trees of several requests, one behind the other; each is made when it is asked for.

    nodes, values, attributions, attribution_log_probs  as in `TokenTree`, of all trees; nodes are
                      counted from their own tree's first
    ends              int64 [2, trees]  where the nodes and the attributions of each tree end
    names             drafters, of all trees
    """

    nodes: Int32
    values: Float64
    attributions: Int32
    attribution_log_probs: Float32
    ends: Int64
    names: tuple[str, ...]

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> TreeBatch:
        """The batch of these trees, whose drafters' ids are of one table."""
        if isinstance(trees, TreeBatch):
            return trees
        if not trees:
            return empty_trees(0)
        sizes = [[len(t.values) for t in trees], [len(t.attributions) for t in trees]]
        return cls(
            np.concatenate([tree.nodes for tree in trees]),
            np.concatenate([tree.values for tree in trees]),
            np.concatenate([tree.attributions for tree in trees]),
            np.concatenate([tree.attribution_log_probs for tree in trees]),
            np.array(sizes, dtype=np.int64).cumsum(axis=1),
            max((tree.names for tree in trees), key=len),
        )

    def __len__(self) -> int:
        return self.ends.shape[1]

    @overload
    def __getitem__(self, index: int) -> TokenTree: ...

    @overload
    def __getitem__(self, index: slice) -> TreeBatch: ...

    def __getitem__(self, index: int | slice) -> TokenTree | TreeBatch:
        if isinstance(index, slice):
            return TreeBatch.of([self[place] for place in range(len(self))[index]])
        place = range(len(self))[index]
        end, attribution_end = self.ends[:, place].tolist()
        first, first_attribution = self.ends[:, place - 1].tolist() if place else (0, 0)
        return TokenTree(
            self.nodes[first:end],
            self.values[first:end],
            self.attributions[first_attribution:attribution_end],
            self.attribution_log_probs[first_attribution:attribution_end],
            self.names,
        )

    @property
    def node_ends(self) -> Int64:
        """int64 [trees]: where the nodes of each tree end."""
        return self.ends[0]

    @property
    def sizes(self) -> Int64:
        """int64 [trees]: nodes of each."""
        return lengths_of(self.ends[0])

    def keep(self, kept: Bool) -> TreeBatch:
        """`TokenTree.keep` of all trees; `kept` is bool, of the nodes of all."""
        if kept.all():
            return self
        arrays = tree_loops.keep_nodes(
            self.nodes,
            self.values,
            self.attributions,
            self.attribution_log_probs,
            self.ends[0],
            self.ends[1],
            kept,
        )
        return TreeBatch(*arrays, self.names)

    def best_of_each(self, limits: Sequence[int]) -> Bool:
        """bool, of the nodes of all: the most valuable of each tree, at most `limits` of them."""
        return tree_loops.best_of_each(self.values, self.ends[0], np.array(limits, dtype=np.int64))

    def ancestors(self) -> UInt64:
        """`TokenTree.ancestors` of all trees, uint64 [sum of rows * words]."""
        return tree_loops.ancestor_bits(self.nodes, self.ends[0])

    def count_sources(self) -> list[dict[str, int]]:
        """`TokenTree.count_sources` of all trees."""
        counts = tree_loops.count_sources(self.nodes, self.ends[0], len(self.names))
        # Most trees of a step have as many of each as another one.
        known: dict[tuple[int, ...], dict[str, int]] = {}
        return [
            known.get(row) or known.setdefault(row, self._named(row))
            for row in map(tuple, counts.tolist())
        ]

    def _named(self, counts: tuple[int, ...]) -> dict[str, int]:
        return {name: count for name, count in zip(self.names, counts, strict=True) if count}


NO_TREE = TokenTree(
    np.empty((0, 4), dtype=np.int32),
    np.empty(0),
    np.empty((0, 4), dtype=np.int32),
    np.empty(0, dtype=np.float32),
    (),
)


def empty_trees(count: int) -> TreeBatch:
    """So many trees of no nodes."""
    ends = np.zeros((2, count), dtype=np.int64)
    return TreeBatch(
        NO_TREE.nodes,
        NO_TREE.values,
        NO_TREE.attributions,
        NO_TREE.attribution_log_probs,
        ends,
        (),
    )
