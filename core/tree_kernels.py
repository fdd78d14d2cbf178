"""The loops over the nodes of token trees, compiled; `tree` gives them their meaning.

Nodes stand in topological order: a parent has a lower index than its children, ROOT is -1. A claim
says that a drafter proposed a node: one row (node, drafter, rank among the drafter's children
of the parent) and the drafter's log-probability.
"""

from __future__ import annotations

import numpy as np

from .acceptance import bin_of, estimate, record
from .compiled import compiled
from .types import ROOT, Bool, Float32, Float64, Int32, Int64

# Stands for the parent of nodes that had no room.
CUT = ROOT - 1


@compiled
def merge_nodes(  # noqa: C901, PLR0913, PLR0917 - flat arrays, and one loop over them
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

    ends          int64 [proposals]  where each ends in the arrays
    sources       int32 [proposals]
    request_ends  int64 [requests]  where each request's proposals end
    counts        of an `AcceptanceTable`; without drafters every node is worth the same

    Gives int32 [n, 4] nodes (token, parent, depth, source), float64 [n] values, int32 [n, 3]
    claims, float32 [n] their log-probabilities, int64 [2, requests] how many nodes and claims each
    request has. Those of a request begin where its first proposal does.
    """
    size = len(tokens)
    nodes = np.empty((size, 4), dtype=np.int32)
    values = np.zeros(size, dtype=np.float64)
    claims = np.empty((size, 3), dtype=np.int32)
    claim_log_probs = np.empty(size, dtype=np.float32)
    sizes = np.zeros((2, len(request_ends)), dtype=np.int64)
    # Of the proposals' nodes: the tree's node or CUT, and how many children came so far, at the
    # end of the root.
    placed = np.empty(size, dtype=np.int32)
    num_children = np.zeros(size + 1, dtype=np.int32)
    proposal, start = 0, 0
    for request in range(len(request_ends)):
        first, count, num_claims = start, 0, 0
        while proposal < request_ends[request]:
            source = sources[proposal]
            num_children[size] = 0
            for index in range(start, ends[proposal]):
                own_parent = size if parents[index] == ROOT else start + parents[index]
                rank = num_children[own_parent]
                num_children[own_parent] += 1
                parent, depth, above = ROOT, 1, 1.0
                if own_parent != size:
                    parent = placed[own_parent]
                    if parent == CUT:
                        placed[index] = CUT
                        continue
                    depth = nodes[first + parent, 2] + 1
                    above = values[first + parent]
                node = _child(nodes[first : first + count], parent, tokens[index])
                if node == ROOT:
                    if count >= max_nodes[request] or depth > max_depths[request]:
                        placed[index] = CUT
                        continue
                    node = count
                    count += 1
                    row = nodes[first + node]
                    row[0], row[1], row[2], row[3] = tokens[index], parent, depth, source
                placed[index] = node
                claim = claims[first + num_claims]
                claim[0], claim[1], claim[2] = node, source, rank
                claim_log_probs[first + num_claims] = log_probs[index]
                num_claims += 1
                value = 1.0
                if len(counts):
                    node_bin = bin_of(log_probs[index], depth, rank)
                    value = above * estimate(counts, source, node_bin)
                values[first + node] = max(values[first + node], value)
            start = ends[proposal]
            proposal += 1
        sizes[0, request], sizes[1, request] = count, num_claims
    return nodes, values, claims, claim_log_probs, sizes


@compiled
def _child(nodes: Int32, parent: int, token: int) -> int:
    """The child of `parent` with this token; ROOT if there is none."""
    for node in range(parent + 1, len(nodes)):
        if nodes[node, 1] == parent and nodes[node, 0] == token:
            return node
    return ROOT


@compiled
def keep_nodes(
    nodes: Int32, values: Float64, claims: Int32, claim_log_probs: Float32, kept: Bool
) -> tuple[Int32, Float64, Int32, Float32]:
    """The same arrays without the nodes that are not `kept`, and without their claims."""
    new_index = np.full(len(kept), ROOT, dtype=np.int32)
    size = 0
    for node in range(len(kept)):
        if kept[node]:
            new_index[node] = size
            size += 1
    new_nodes = np.empty((size, 4), dtype=np.int32)
    new_values = np.empty(size, dtype=np.float64)
    for node in range(len(kept)):
        new = new_index[node]
        if new != ROOT:
            parent = nodes[node, 1]
            row = new_nodes[new]
            row[0], row[2], row[3] = nodes[node, 0], nodes[node, 2], nodes[node, 3]
            row[1] = ROOT if parent == ROOT else new_index[parent]
            new_values[new] = values[node]
    num_claims = 0
    for claim in range(len(claims)):
        num_claims += new_index[claims[claim, 0]] != ROOT
    new_claims = np.empty((num_claims, 3), dtype=np.int32)
    new_log_probs = np.empty(num_claims, dtype=np.float32)
    place = 0
    for claim in range(len(claims)):
        new = new_index[claims[claim, 0]]
        if new != ROOT:
            row = new_claims[place]
            row[0], row[1], row[2] = new, claims[claim, 1], claims[claim, 2]
            new_log_probs[place] = claim_log_probs[claim]
            place += 1
    return new_nodes, new_values, new_claims, new_log_probs


@compiled
def ancestor_mask(nodes: Int32) -> Bool:
    """bool [n + 1, n + 1]: row i + 1 sees the root, the ancestors of node i and itself."""
    size = len(nodes) + 1
    mask = np.zeros((size, size), dtype=np.bool_)
    mask[0, 0] = True
    for node in range(size - 1):
        above = nodes[node, 1] + 1
        for column in range(above + 1):
            mask[node + 1, column] = mask[above, column]
        mask[node + 1, node + 1] = True
    return mask


@compiled
def follow(nodes: Int32, targets: Int32) -> Int32:
    """The rows that the target's choices go through, `targets[row]` after each.

    Gives int32 [3, k + 1]: the root's row 0 and those of the k nodes, the tokens that the target
    chose after them, and the sources of these tokens, of which the last is no node's: -1.
    """
    found = np.empty((3, len(nodes) + 1), dtype=np.int32)
    found[0, 0] = 0
    count = 0
    last = ROOT
    for node in range(len(nodes)):
        if nodes[node, 1] == last and nodes[node, 0] == targets[last + 1]:
            last = node
            found[1, count] = nodes[node, 0]
            found[2, count] = nodes[node, 3]
            count += 1
            found[0, count] = node + 1
    found[1, count] = targets[last + 1]
    found[2, count] = -1
    return found[:, : count + 1]


@compiled
def count_sources(nodes: Int32, num_sources: int) -> Int64:
    """int64 [num_sources]: the nodes of each drafter."""
    counts = np.zeros(num_sources, dtype=np.int64)
    for node in range(len(nodes)):
        counts[nodes[node, 3]] += 1
    return counts


@compiled
def learn(
    nodes: Int32, claims: Int32, claim_log_probs: Float32, path_tokens: Int32, counts: Float64
) -> None:
    """Record every claim on a child of what the target said, right or wrong."""
    # After the root and each node: which of the target's tokens comes there; -1 off its path.
    following = np.full(len(nodes) + 1, -1, dtype=np.int32)
    following[0] = 0
    for node in range(len(nodes)):
        index = following[nodes[node, 1] + 1]
        if 0 <= index < len(path_tokens) and nodes[node, 0] == path_tokens[index]:
            following[node + 1] = index + 1
    for claim in range(len(claims)):
        node = claims[claim, 0]
        index = following[nodes[node, 1] + 1]
        if 0 <= index < len(path_tokens):
            node_bin = bin_of(claim_log_probs[claim], nodes[node, 2], claims[claim, 2])
            record(counts, claims[claim, 1], node_bin, nodes[node, 0] == path_tokens[index])


@compiled
def credit(claims: Int32, rows: Int32, costs: Float64, credits: Int64) -> None:
    """Add 1 in `credits` [drafters] for each of `rows` but the root's, to its cheapest drafter.

    costs  float64 [drafters]
    """
    for index in range(1, len(rows)):
        node = rows[index] - 1
        best = -1
        for claim in range(len(claims)):
            source = claims[claim, 1]
            if claims[claim, 0] == node and (best < 0 or costs[source] < costs[best]):
                best = source
        if best >= 0:
            credits[best] += 1
