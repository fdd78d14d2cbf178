"""What is committed of each tree: the acceptance walk of coupled sampling, or a rule's verification
result.

Why the walk gives the text of plain decoding: docs/algorithms/sampling.md and verification.md,
"Coupled walk".
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..arrays import Int32, Int64
from ..compiled import compiled
from ..request.output import TARGET_SOURCE
from ..request.request import NO_MOVES
from ..steps import StepOutput, VerificationResult
from ..tree.kernels import PARENT, SOURCE, TOKEN
from ..tree.tree import TokenTree, TreeBatch


class Walk(NamedTuple):
    """What is committed of one tree.

    rows        of the tree's step: the root's, then those of the k accepted nodes
    tokens      k + 1, the target's tokens after these rows: those of the nodes, and the bonus token
    sources     whom they are from: drafters, and the target
    drafted     how many of the tree's nodes each drafter proposed first
    token_ids   int32 [k + 1]  `tokens`
    moves       int32 [m, 2]  KV copies (from slot, to slot) that bring these rows together
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    sources: tuple[str, ...]
    drafted: dict[str, int]
    token_ids: Int32
    moves: Int32


class RowSlots(NamedTuple):
    """Where the rows of a step's requests begin, int32 [requests], and the KV slot of each row,
    int32 [rows]."""

    starts: Int32
    slots: Int32


def walks_of(trees: TreeBatch, output: StepOutput, row_slots: RowSlots) -> list[Walk]:
    """What is committed of a step's trees, which stand first in it."""
    if output.verification_results is None:
        return walk_all(trees, output.target_tokens, row_slots)
    return _cut(trees, *_as_decided(trees, output.verification_results), row_slots)


def _as_decided(
    trees: TreeBatch, verification_results: Sequence[VerificationResult]
) -> tuple[Int32, Int64]:
    """The rows of a rule's results, as `follow` gives them."""
    lengths = [len(path) + 1 for path, _ in verification_results]
    ends = np.array(lengths, dtype=np.int64).cumsum()
    nodes = [
        [*tree.nodes[path][:, [TOKEN, SOURCE]].tolist(), [token, -1]]
        for tree, (path, token) in zip(trees, verification_results, strict=True)
    ]
    rows = [[0, *(node + 1 for node in path)] for path, _ in verification_results]
    tokens_and_sources = np.array(list(chain.from_iterable(nodes)), dtype=np.int32).T
    flat_rows = np.array(list(chain.from_iterable(rows)), dtype=np.int32)
    return np.stack([flat_rows, *tokens_and_sources]), ends


def walk_all(trees: Sequence[TokenTree], target_tokens: Int32, row_slots: RowSlots) -> list[Walk]:
    """Follow the target's own choices through each tree until they leave it.

    `target_tokens` int32 holds, tree by tree, the target's token after the root and after each
    node. Each is a function of the text before it and of noise keyed by position, so the committed
    tokens are those of plain decoding, whatever stands in the tree.
    """
    if not trees:
        return []
    batch = TreeBatch.of(trees)
    return _cut(batch, *follow(batch.nodes, batch.node_ends, target_tokens), row_slots)


def _cut(trees: TreeBatch, steps: Int32, ends: Int64, row_slots: RowSlots) -> list[Walk]:
    """The walks of each tree; `steps` and `ends` are as `follow` gives them."""
    # The last one stands for the target, whose id is -1.
    names = (*trees.names, TARGET_SOURCE)
    rows, tokens, source_ids = map(tuple, steps.tolist())
    sources = tuple([names[source] for source in source_ids])
    ids = steps[1].copy()
    moves, move_ends = kv_moves(steps[0], ends, row_slots.starts, row_slots.slots)
    walks, first, first_move = [], 0, 0
    for end, move_end, drafted in zip(
        ends.tolist(), move_ends.tolist(), trees.count_sources(), strict=True
    ):
        own = slice(first, end)
        own_moves = moves[first_move:move_end] if move_end > first_move else NO_MOVES
        walks.append(Walk(rows[own], tokens[own], sources[own], drafted, ids[own], own_moves))
        first, first_move = end, move_end
    return walks


@compiled
def follow(nodes: Int32, ends: Int64, targets: Int32) -> tuple[Int32, Int64]:
    """The rows that the target's choices go through, `targets[row]` after each row of all trees.

    Gives int32 [3, rows]: of each tree the root's row 0 and those of the k nodes, the tokens that
    the target chose after them, and the sources of these tokens, of which the last is no node's:
    -1. And int64 [trees]: where those of each tree end.
    """
    steps = np.empty((3, len(nodes) + len(ends)), dtype=np.int32)
    step_ends = np.empty(len(ends), dtype=np.int64)
    count, first, root = 0, 0, 0
    for tree in range(len(ends)):
        last = 0
        steps[0, count] = 0
        for node in range(first, ends[tree]):
            if nodes[node, PARENT] + 1 == last and nodes[node, TOKEN] == targets[root + last]:
                last = node - first + 1
                steps[1, count] = nodes[node, TOKEN]
                steps[2, count] = nodes[node, SOURCE]
                count += 1
                steps[0, count] = last
        steps[1, count] = targets[root + last]
        steps[2, count] = -1
        count += 1
        step_ends[tree] = count
        root += ends[tree] - first + 1
        first = ends[tree]
    return steps[:, :count], step_ends


@compiled
def kv_moves(rows: Int32, ends: Int64, starts: Int32, slots: Int32) -> tuple[Int32, Int64]:
    """KV copies that bring the root and the accepted nodes of each request together, in order.

    rows, ends  int32 [rows], int64 [requests]  committed rows of each request, and where they end
    starts      int32 [requests]                where its rows begin in the step
    slots       int32 [rows of the step]        where their KV stands

    Gives int32 [m, 2] (from slot, to slot) and int64 [requests], where those of each end. A row
    that stands behind its predecessor already is not moved.
    """
    moves = np.empty((len(rows), 2), dtype=np.int32)
    move_ends = np.empty(len(ends), dtype=np.int64)
    count, first = 0, 0
    for request in range(len(ends)):
        for index in range(first, ends[request]):
            place = index - first
            if rows[index] != place:
                moves[count, 0] = slots[starts[request] + rows[index]]
                moves[count, 1] = slots[starts[request] + place]
                count += 1
        first = ends[request]
        move_ends[request] = count
    return moves[:count], move_ends
