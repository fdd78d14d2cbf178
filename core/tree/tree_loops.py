"""The compiled loops over the nodes of token trees; `core/tree/tree.py` explains the arrays.

Nodes stand in topological order: a parent has a lower index than its children, ROOT is -1. Arrays
of several trees stand one behind the other, and nodes are counted from their own tree's first. An
attribution says that a drafter proposed a node: one row (node, drafter, rank among the drafter's
children of the parent, depth in its proposal) and the drafter's log-probability.
"""

from __future__ import annotations

import numpy as np

from ..arrays import ROOT, Bool, Float32, Float64, Int32, Int64, UInt8, UInt64
from ..compiled import compiled
from ..steps import WORD_BITS
from .acceptance import estimate

# Stands for the parent of nodes that had no room.
CUT = ROOT - 1
# Columns of nodes, and of attributions.
TOKEN, PARENT, DEPTH, SOURCE = range(4)
NODE, DRAFTER, RANK, DRAFTED_DEPTH = range(4)


@compiled
def merge_nodes(  # noqa: PLR0917 - flat arrays, and one loop over them
    tokens: Int32,
    parents: Int32,
    log_probs: Float32,
    ends: Int64,
    sources: Int32,
    request_ends: Int64,
    max_nodes: Int64,
    max_depths: Int64,
    counts: Float64,
) -> tuple[Int32, Float64, Int32, Float32, Int64]:
    """Merge the proposals of each request, whose arrays stand one behind the other.

    `ends` is int64 [proposals], where each ends in the arrays; `sources` int32 [proposals];
    `request_ends` int64 [requests], where each request's proposals end; `counts` of an
    `AcceptanceTable`: without drafters every node is worth the same.

    Gives int32 [n, 4] nodes (token, parent, depth, source), float64 [n] values, int32 [m, 4]
    attributions, float32 [m] their log-probabilities, int64 [2, requests] where each tree's end.
    """
    size = len(tokens)
    nodes, values = np.empty((size, 4), dtype=np.int32), np.zeros(size, dtype=np.float64)
    attributions = np.empty((size, 4), dtype=np.int32)
    attribution_log_probs = np.empty(size, dtype=np.float32)
    tree_ends = np.zeros((2, len(request_ends)), dtype=np.int64)
    # Of the proposals' nodes: the tree's node or CUT, and how many children came so far. The root's
    # stand at the end.
    placed, num_children = np.empty(size + 1, dtype=np.int32), np.zeros(size + 1, dtype=np.int32)
    placed[size] = ROOT
    # Of the tree's nodes: the newest child, of the root first; and the child before it.
    newest, before = np.empty(size + 1, dtype=np.int32), np.empty(size, dtype=np.int32)
    proposal, start, end, used = 0, 0, 0, 0
    for request in range(len(request_ends)):
        first, count, tree = end, 0, nodes[end:]
        newest[0] = ROOT
        while proposal < request_ends[request]:
            source = sources[proposal]
            num_children[size] = 0
            for index in range(start, ends[proposal]):
                own_parent = size if parents[index] == ROOT else start + parents[index]
                rank, parent = num_children[own_parent], placed[own_parent]
                num_children[own_parent] += 1
                room = max_nodes[request], max_depths[request]
                node = _place(tree, newest, before, count, parent, tokens[index], source, room)
                placed[index] = node
                if node == CUT:
                    continue
                count = max(count, node + 1)
                depth = nodes[first + node, DEPTH]
                row = attributions[used]
                row[NODE], row[DRAFTER], row[RANK], row[DRAFTED_DEPTH] = node, source, rank, depth
                attribution_log_probs[used] = log_probs[index]
                used += 1
                above = 1.0 if parent == ROOT else float(values[first + parent])
                value = _value(counts, above, source, log_probs[index], depth, rank)
                values[first + node] = max(values[first + node], value)
            start, proposal = ends[proposal], proposal + 1
        end = first + count
        tree_ends[0, request], tree_ends[1, request] = end, used
    return nodes[:end], values[:end], attributions[:used], attribution_log_probs[:used], tree_ends


@compiled
def _place(
    nodes: Int32,
    newest: Int32,
    before: Int32,
    count: int,
    parent: int,
    token: int,
    source: int,
    room: tuple[int, int],
) -> int:
    """The node of `token` after `parent`, made where there is none yet; CUT where it has no room.

    nodes   of one tree, which has `count`
    newest  of the root and of each node the newest child, and `before` of each node the child of
            its parent that came before it; ROOT: none
    room    most nodes, largest depth
    """
    if parent == CUT:
        return CUT
    child = newest[parent + 1]
    while child != ROOT:
        if nodes[child, TOKEN] == token:
            return int(child)
        child = before[child]
    depth = 1 if parent == ROOT else nodes[parent, DEPTH] + 1
    if count >= room[0] or depth > room[1]:
        return CUT
    row = nodes[count]
    row[TOKEN], row[PARENT], row[DEPTH], row[SOURCE] = token, parent, depth, source
    before[count], newest[parent + 1], newest[count + 1] = newest[parent + 1], count, ROOT
    return count


@compiled
def _value(
    counts: Float64, above: float, source: int, log_prob: float, depth: int, rank: int
) -> float:
    """The probability that the target goes through a node, `above` being that of its parent."""
    if not len(counts):
        return 1.0
    return above * estimate(counts, source, log_prob, depth, rank)


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
            for place in range(limits[tree]):
                kept[first + order[place]] = True
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
    place, word = 0, 0
    for size in sizes:
        for _ in range(size):
            for column in range(size):
                bit = bits[word + column // WORD_BITS] >> np.uint64(column % WORD_BITS)
                visible[place] = bit & np.uint64(1)
                place += 1
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
