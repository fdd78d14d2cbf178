"""The token tree of one request: all drafters' proposals merged by prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from ..arrays import ROOT, Bool, Float32, Float64, Int32, Int64, UInt64
from . import kernels as tree_kernels
from .acceptance_table import AcceptanceTable
from .kernels import WORD_BITS, unpack


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """Merged nodes in topological order; node i is row i + 1 of the request's step, root is row 0.

    Siblings never share a token.

    nodes                  int32 [n, 4]  tokens, parents, depths and sources, as below
    values                 float64 [n]   probability that the target's path goes through the node;
                           never above its parent's
    attributions           int32 [m, 3]  one for each drafter that proposed a node: node, drafter,
                           and its place among that drafter's children of the parent
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
        (counts,) = count_sources([self])
        return counts

    def mask(self) -> Bool:
        """bool [n + 1, n + 1]: row i sees row j; row 0 is the root, and every row sees itself."""
        return unpack(self.ancestors(), len(self) + 1)

    def ancestors(self) -> UInt64:
        """The mask in bits, as `core/tree/kernels.py` packs it."""
        (bits,) = ancestor_bits([self])
        return bits

    def keep(self, kept: Bool) -> TokenTree:
        """The tree of these nodes; the parent of each must be among them. `kept` is bool [n]."""
        (tree,) = keep_all([self], kept)
        return tree

    def learn(self, table: AcceptanceTable, path_tokens: Sequence[int]) -> None:
        """Tell the `table` of its merge which nodes were right, for the target's own tokens.

        Only nodes below what the target said are judged; the others' parents were wrong.
        """
        assert table.names[: len(self.names)] == self.names
        said = np.array(path_tokens, dtype=np.int32)
        tree_kernels.learn(
            self.nodes, self.attributions, self.attribution_log_probs, said, table.counts
        )

    def check(self) -> None:
        """Assert the invariants above."""
        count, num_attributions = len(self), len(self.attribution_log_probs)
        assert self.nodes.shape == (count, 4)
        assert self.attributions.shape == (num_attributions, 3)
        assert np.all((self.parents >= ROOT) & (self.parents < np.arange(count)))
        above = np.where(self.parents == ROOT, 0, self.depths[self.parents])
        assert np.array_equal(self.depths, above + 1)
        assert len(set(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))) == count
        limits = np.where(self.parents == ROOT, 1.0, self.values[self.parents])
        assert np.all(self.values <= limits)
        firsts: dict[int, int] = dict(self.attributions[::-1, :2].tolist())
        assert [firsts[node] for node in range(count)] == self.sources.tolist()


def keep_all(trees: Sequence[TokenTree], kept: Bool) -> list[TokenTree]:
    """`TokenTree.keep` of all trees; `kept` is bool, of the nodes of all."""
    if kept.all():
        return list(trees)
    nodes, values, attributions, log_probs, ends = tree_kernels.keep_nodes(
        stacked_nodes(trees),
        np.concatenate([tree.values for tree in trees]),
        stacked_attributions(trees),
        np.concatenate([tree.attribution_log_probs for tree in trees]),
        node_ends(trees),
        attribution_ends(trees),
        kept,
    )
    cut, first, first_attribution = [], 0, 0
    for tree, end, attribution_end in zip(trees, *ends.tolist(), strict=True):
        own, own_attributions = slice(first, end), slice(first_attribution, attribution_end)
        cut.append(
            TokenTree(
                nodes[own],
                values[own],
                attributions[own_attributions],
                log_probs[own_attributions],
                tree.names,
            )
        )
        first, first_attribution = end, attribution_end
    return cut


def ancestor_bits(trees: Sequence[TokenTree]) -> list[UInt64]:
    """`TokenTree.ancestors` of all trees."""
    if not trees:
        return []
    flat = tree_kernels.ancestor_bits(stacked_nodes(trees), node_ends(trees))
    found, start = [], 0
    for tree in trees:
        rows = len(tree) + 1
        end = start + rows * -(-rows // WORD_BITS)
        found.append(flat[start:end].reshape(rows, -1))
        start = end
    return found


def count_sources(trees: Sequence[TokenTree]) -> list[dict[str, int]]:
    """`TokenTree.count_sources` of all trees."""
    if not trees:
        return []
    num_sources = max(len(tree.names) for tree in trees)
    counts = tree_kernels.count_sources(stacked_nodes(trees), node_ends(trees), num_sources)
    return [
        {name: count for name, count in zip(tree.names, row, strict=False) if count}
        for tree, row in zip(trees, counts.tolist(), strict=True)
    ]


def attribute(
    trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], costs: Float64
) -> list[int]:
    """How many nodes each drafter has among these rows of the trees, in the order of their names.

    A row's node belongs to the drafter that takes least of those that proposed it; `costs` is
    float64 [drafters], in seconds.
    """
    if not trees:
        return [0] * len(costs)
    row_ends = np.array(list(accumulate(map(len, rows))), dtype=np.int64)
    flat_rows = np.array(list(chain.from_iterable(rows)), dtype=np.int32)
    credits = tree_kernels.attribute(
        stacked_attributions(trees), attribution_ends(trees), flat_rows, row_ends, costs
    )
    return credits.tolist()


def stacked_nodes(trees: Sequence[TokenTree]) -> Int32:
    """The nodes of at least one tree, one tree behind the other."""
    return np.concatenate([tree.nodes for tree in trees])


def stacked_attributions(trees: Sequence[TokenTree]) -> Int32:
    """The attributions likewise."""
    return np.concatenate([tree.attributions for tree in trees])


def node_ends(trees: Sequence[TokenTree]) -> Int64:
    """Where the nodes of each tree end among those of all."""
    return np.array(list(accumulate(len(tree.values) for tree in trees)), dtype=np.int64)


def attribution_ends(trees: Sequence[TokenTree]) -> Int64:
    """Where the attributions of each tree end among those of all."""
    return np.array(list(accumulate(len(tree.attributions) for tree in trees)), dtype=np.int64)


NO_TREE = TokenTree(
    np.empty((0, 4), dtype=np.int32),
    np.empty(0),
    np.empty((0, 3), dtype=np.int32),
    np.empty(0, dtype=np.float32),
    (),
)
