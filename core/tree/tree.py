"""Token trees: all drafters' proposals merged by prefix, of one request and of a whole step.

Below them stand the compiled loops over their nodes.

Nodes stand in topological order: a parent has a lower index than its children, ROOT is -1. Arrays
of several trees stand one behind the other, and nodes are counted from their own tree's first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from ..arrays import ROOT, Bool, Float32, Float64, Int32, Int64, UInt8, UInt64, lengths_of
from ..compiled import compiled
from ..steps import WORD_BITS


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """Merged nodes in topological order; node i is row i + 1 of the request's step, root is row 0.

    Siblings never share a token.

    nodes                  int32 [n, 4]  tokens, parents, depths and sources, as below
    values                 float64 [n]   probability that the target's path goes through the node;
                           never above its parent's
    attributions           int32 [m, 4]  one for each drafter that proposed a node: node, drafter,
                           its rank among that drafter's children of the parent, and its depth in
                           what the drafter proposed
    attribution_log_probs  float32 [m]  what these drafters gave
    names                  drafters; the ids above are their indices
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
        """The mask in bits, as `core/tree/tree.py` packs it."""
        ends = np.array([len(self)], dtype=np.int64)
        return ancestor_bits(self.nodes, ends).reshape(len(self) + 1, -1)

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
            return TreeBatch.of([self[own] for own in range(len(self))[index]])
        index = range(len(self))[index]
        end, attribution_end = self.ends[:, index].tolist()
        first, first_attribution = self.ends[:, index - 1].tolist() if index else (0, 0)
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
        arrays = keep_nodes(
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
        return best_of_each(self.values, self.ends[0], np.array(limits, dtype=np.int64))

    def ancestors(self) -> UInt64:
        """`TokenTree.ancestors` of all trees, uint64 [sum of rows * words]."""
        return ancestor_bits(self.nodes, self.ends[0])

    def count_sources(self) -> list[dict[str, int]]:
        """`TokenTree.count_sources` of all trees."""
        counts = count_sources(self.nodes, self.ends[0], len(self.names))
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


# Columns of nodes, and of attributions.
TOKEN, PARENT, DEPTH, SOURCE = range(4)
NODE, DRAFTER, RANK, DRAFTED_DEPTH = range(4)


@compiled
def keep_nodes(
    nodes: Int32,
    values: Float64,
    attributions: Int32,
    attribution_log_probs: Float32,
    node_ends: Int64,
    attribution_ends: Int64,
    kept: Bool,
) -> tuple[Int32, Float64, Int32, Float32, Int64]:
    """The same arrays without the nodes that are not `kept`, and without
    their attributions.

    node_ends, attribution_ends  int64 [trees]  where each tree's end

    The last result is int64 [2, trees]: where the nodes and attributions of each tree end in the
    others.
    """
    new_nodes = np.empty_like(nodes)
    new_values = np.empty_like(values)
    new_attributions = np.empty_like(attributions)
    new_log_probs = np.empty_like(attribution_log_probs)
    ends = np.empty((2, len(node_ends)), dtype=np.int64)
    new_index = np.full(len(nodes), ROOT, dtype=np.int32)
    size, num_attributions, first, attribution = 0, 0, 0, 0
    for tree in range(len(node_ends)):
        new_first = size
        for node in range(first, node_ends[tree]):
            if kept[node]:
                new_index[node] = size - new_first
                parent = nodes[node, PARENT]
                row = new_nodes[size]
                row[:] = nodes[node]
                row[PARENT] = ROOT if parent == ROOT else new_index[first + parent]
                new_values[size] = values[node]
                size += 1
        while attribution < attribution_ends[tree]:
            new = new_index[first + attributions[attribution, NODE]]
            if new != ROOT:
                row = new_attributions[num_attributions]
                row[:] = attributions[attribution]
                row[NODE] = new
                new_log_probs[num_attributions] = attribution_log_probs[attribution]
                num_attributions += 1
            attribution += 1
        first = node_ends[tree]
        ends[0, tree], ends[1, tree] = size, num_attributions
    return (
        new_nodes[:size],
        new_values[:size],
        new_attributions[:num_attributions],
        new_log_probs[:num_attributions],
        ends,
    )


@compiled
def best_of_each(values: Float64, ends: Int64, limits: Int64) -> Bool:
    """bool [n]: the `limits[tree]` most valuable nodes of each tree; of equal ones the first.

    A node is worth no more than its parent, so what is kept are trees.
    """
    kept = np.ones(len(values), dtype=np.bool_)
    first = 0
    for tree in range(len(ends)):
        end = ends[tree]
        if end - first > limits[tree]:
            order = np.argsort(-values[first:end], kind="mergesort")
            kept[first:end] = False
            for rank in range(limits[tree]):
                kept[first + order[rank]] = True
        first = end
    return kept


@compiled
def ancestor_bits(nodes: Int32, ends: Int64) -> UInt64:
    """The masks of all trees, one behind the other, each uint64 [n + 1, words]: bit c is row c.

    Row i + 1 sees the root, the ancestors of node i and itself.
    """
    total, first = 0, 0
    for end in ends:
        total += (end - first + 1) * ((end - first) // WORD_BITS + 1)
        first = end
    bits = np.zeros(total, dtype=np.uint64)
    start, first = 0, 0
    for end in ends:
        words = (end - first) // WORD_BITS + 1
        for row in range(end - first + 1):
            first_word = start + row * words
            if row:
                parent_word = start + (nodes[first + row - 1, PARENT] + 1) * words
                for word in range(words):
                    bits[first_word + word] = bits[parent_word + word]
            bits[first_word + row // WORD_BITS] |= np.uint64(1) << np.uint64(row % WORD_BITS)
        start += (end - first + 1) * words
        first = end
    return bits


@compiled
def visible_columns(bits: UInt64, sizes: Int32) -> UInt8:
    """The masks of trees of so many rows, one behind the other: 1 where a row sees a column.

    `bits` as of `ancestor_bits`, one tree behind the other; `sizes` int32 [trees].
    """
    total = 0
    for size in sizes:
        total += size * size
    visible = np.empty(total, dtype=np.uint8)
    cell, word = 0, 0
    for size in sizes:
        for _ in range(size):
            for column in range(size):
                bit = bits[word + column // WORD_BITS] >> np.uint64(column % WORD_BITS)
                visible[cell] = bit & np.uint64(1)
                cell += 1
            word += -(-size // WORD_BITS)
    return visible


@compiled
def count_sources(nodes: Int32, ends: Int64, num_sources: int) -> Int64:
    """int64 [trees, num_sources]: the nodes of each drafter."""
    counts = np.zeros((len(ends), num_sources), dtype=np.int64)
    node = 0
    for tree in range(len(ends)):
        while node < ends[tree]:
            counts[tree, nodes[node, SOURCE]] += 1
            node += 1
    return counts


def pack(mask: Bool) -> UInt64:
    """uint64 [rows, words] of a mask [rows, columns]: column c is bit c % 64 of word c // 64."""
    rows, columns = mask.shape
    padded = np.zeros((rows, -(-columns // WORD_BITS) * WORD_BITS), dtype=np.bool_)
    padded[:, :columns] = mask
    return np.packbits(padded, axis=1, bitorder="little").view("<u8").astype(np.uint64)


def unpack(bits: UInt64, num_columns: int) -> Bool:
    """The mask, bool [rows, columns], of the words of `pack`."""
    data = bits.astype("<u8", copy=False).view(np.uint8)
    return np.unpackbits(data, axis=1, count=num_columns, bitorder="little").view(np.bool_)


def with_masks(mask: Bool, root: int, masks: Sequence[Bool]) -> Bool:
    """The mask with square ones behind it, whose rows also see the root's column `root`."""
    count = sum(map(len, masks))
    rows, columns = mask.shape
    whole = np.zeros((rows + count, columns + count), dtype=np.bool_)
    whole[:rows, :columns] = mask
    whole[rows:, root] = True
    for own in masks:
        end = len(own)
        whole[rows : rows + end, columns : columns + end] = own
        rows, columns = rows + end, columns + end
    return whole
