"""What is committed of each tree: the acceptance walk of coupled sampling (`follow`), or a rule's
verification result.

Why the walk gives the text of plain decoding: docs/how-it-works.md, "Coupled walk".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..arrays import Int32, Int64, lengths_of
from ..compiled import compiled
from ..kv_cache import NO_MOVES
from ..request.output import TARGET_SOURCE
from ..steps import StepOutput, VerificationResult
from ..tree.tree import TreeBatch
from ..tree.tree_loops import PARENT, SOURCE, TOKEN


class Walk(NamedTuple):
    """What is committed of one tree.

    rows        of the tree's step: the root's, then those of the k accepted nodes
    tokens      k + 1, the target's tokens after these rows: those of the nodes, and the bonus token
    sources     whom they are from: drafters, and the target
    token_ids   int32 [k + 1]  `tokens`
    moves       int32 [m, 2]  KV copies (from slot, to slot) that bring these rows together
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    sources: tuple[str, ...]
    token_ids: Int32
    moves: Int32


class Paths(NamedTuple):
    """The walks through several trees, one behind the other.

    steps  int32 [3, n]  rows and tokens, as in `Walk`, and the ids of the tokens' sources; the
           target's is -1. All tokens that a stage decoded one behind the other are the root's row
    ends   int64 [trees]  where each tree's end
    """

    steps: Int32
    ends: Int64

    @classmethod
    def of(cls, paths: Sequence[Sequence[tuple[int, int, int]]]) -> Paths:
        """Those of these rows, tokens and sources."""
        ends = np.array([len(path) for path in paths], dtype=np.int64).cumsum()
        steps = np.array(list(chain.from_iterable(paths)), dtype=np.int32).reshape(-1, 3)
        return cls(np.ascontiguousarray(steps.T), ends)

    def of_each(self) -> list[Sequence[tuple[int, int, int]]]:
        """Those through each tree, as `of` takes them."""
        steps, ends = list(zip(*self.steps.tolist(), strict=True)), self.ends.tolist()
        return [steps[first:end] for first, end in zip([0, *ends], ends, strict=False)]

    @property
    def rows(self) -> Int32:
        """int32 [n]"""
        return self.steps[0]

    @property
    def tokens(self) -> Int32:
        """int32 [n]"""
        return self.steps[1]

    @property
    def sources(self) -> Int32:
        """int32 [n]"""
        return self.steps[2]

    def without(self, places: Sequence[int]) -> Paths:
        """Those of the trees at `places` are empty."""
        if not places:
            return self
        lengths = lengths_of(self.ends)
        kept = np.ones(len(lengths), dtype=np.bool_)
        kept[places] = False
        steps = np.ascontiguousarray(self.steps[:, kept.repeat(lengths)])
        return Paths(steps, (lengths * kept).cumsum())


class RowSlots(NamedTuple):
    """Where the rows of a step's requests begin, int32 [requests], and the KV slot of each row,
    int32 [rows]."""

    starts: Int32
    slots: Int32


def paths_of(trees: TreeBatch, output: StepOutput) -> Paths:
    """What is committed of a step's trees, which stand first in it."""
    if output.decoded is not None:
        return _as_decoded(output.decoded)
    if output.verification_results is not None:
        return _as_decided(trees, output.verification_results)
    return Paths(*follow(trees.nodes, trees.node_ends, output.target_tokens))


def _as_decided(trees: TreeBatch, verification_results: Sequence[VerificationResult]) -> Paths:
    """The paths of a rule's results."""
    paths = []
    for tree, (path, token) in zip(trees, verification_results, strict=True):
        rows = [0, *(node + 1 for node in path)]
        taken = [*tree.nodes[path][:, [TOKEN, SOURCE]].tolist(), [token, -1]]
        paths.append([(row, *after) for row, after in zip(rows, taken, strict=True)])
    return Paths.of(paths)


def _as_decoded(tokens: Int32) -> Paths:
    """The paths of roots that tokens [trees, n] follow, whose KV stands where it belongs."""
    num_trees, count = tokens.shape
    none = np.zeros(tokens.size, dtype=np.int32)
    ends = np.arange(1, num_trees + 1, dtype=np.int64) * count
    return Paths(np.stack([none, tokens.ravel(), none - 1]), ends)


def walks_along(paths: Paths, drafters: Sequence[str], row_slots: RowSlots) -> Iterator[Walk]:
    """The walk through each tree; `drafters`: the names of the sources."""
    # The last one stands for the target, whose id is -1.
    names = (*drafters, TARGET_SOURCE)
    rows, tokens, source_ids = map(tuple, paths.steps.tolist())
    sources = tuple([names[source] for source in source_ids])
    ids = paths.tokens.copy()
    moves, move_ends = kv_moves(paths.rows, paths.ends, row_slots.starts, row_slots.slots)
    first, first_move = 0, 0
    for end, move_end in zip(paths.ends.tolist(), move_ends.tolist(), strict=True):
        own = slice(first, end)
        own_moves = moves[first_move:move_end] if move_end > first_move else NO_MOVES
        yield Walk(rows[own], tokens[own], sources[own], ids[own], own_moves)
        first, first_move = end, move_end


@compiled
def follow(nodes: Int32, ends: Int64, targets: Int32) -> tuple[Int32, Int64]:
    """The rows that the target's choices go through, `targets[row]` after each row of all trees.

    Each choice is a function of the text before it and of noise keyed by position, so the committed
    tokens are those of plain decoding, whatever stands in a tree.

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
            # Rows rise along a path.
            if rows[index] > place:
                moves[count, 0] = slots[starts[request] + rows[index]]
                moves[count, 1] = slots[starts[request] + place]
                count += 1
        first = ends[request]
        move_ends[request] = count
    return moves[:count], move_ends
