"""What is committed of each tree: the acceptance walk of coupled sampling, or a rule's
verification result.

The engine walks its trees (`follow`). The last stage finds the same rows from the step itself
(`walk_rows`), so that it knows whose hidden states to hand out. Each is one compiled loop over all
requests. Why the walk gives the text of plain decoding: docs/how-it-works.md, "Coupled walk".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..arrays import Int32, Int64, UInt64, lengths_of
from ..compiled import compiled
from ..kv_cache import NO_MOVES
from ..request.output import TARGET_SOURCE
from ..steps import (
    NO_ROWS,
    WORD_BITS,
    StepInput,
    StepOutput,
    StepTrees,
    TreeRows,
    VerificationResult,
)
from ..tree.tree import PARENT, SOURCE, TOKEN, TreeBatch


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

    def without(self, indices: Sequence[int]) -> Paths:
        """Those of the trees at `indices` are empty."""
        if not indices:
            return self
        lengths = lengths_of(self.ends)
        kept = np.ones(len(lengths), dtype=np.bool_)
        kept[indices] = False
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
            order = index - first
            # Rows rise along a path.
            if rows[index] > order:
                moves[count, 0] = slots[starts[request] + rows[index]]
                moves[count, 1] = slots[starts[request] + order]
                count += 1
        first = ends[request]
        move_ends[request] = count
    return moves[:count], move_ends


# ---- in the last stage, beside the logits


class CommittedRows(NamedTuple):
    """Rows of a step whose tokens are committed with it, request by request.

    rows       int32 [n]
    following  int32 [n]  the token behind each row's own, as it will be committed
    starts     int32 [requests + 1]  rows of request r are starts[r]:starts[r+1]
    """

    rows: Int32
    following: Int32
    starts: Int32


def accepted_rows(
    step: StepInput,
    target_tokens: Int32,
    verification_results: tuple[VerificationResult, ...] | None = None,
) -> Int32:
    """Rows int32 [n] of the step's `feature_requests`, one request behind the other: all of a
    prompt chunk, a tree's root and its accepted nodes, a tree chunk's root and all nodes.

    They are those of `paths_of`, found without the tree's parents.
    `verification_results`: of the step's rule, where another one than `coupled` decides.
    """
    rows, ends = _path_rows(step, target_tokens, verification_results)
    if step.heads.chunk_requests:
        return _with_slices(step, rows, ends)
    is_wanted = np.zeros(len(ends), dtype=np.bool_)
    is_wanted[list(step.heads.feature_requests)] = True
    return rows[is_wanted.repeat(lengths_of(ends))]


def _with_slices(step: StepInput, rows: Int32, ends: Int64) -> Int32:
    """`accepted_rows`, where these are the accepted ones of all requests."""
    starts, chosen, wanted = step.request_starts, step.logits_rows, [NO_ROWS]
    for index in step.heads.feature_requests:
        if index in step.heads.chunk_requests:
            first, end = np.searchsorted(chosen, starts[index : index + 2])
            wanted.append(chosen[first:end])
        else:
            wanted.append(rows[ends[index - 1] if index else 0 : ends[index]])
    return np.concatenate(wanted)


def committed_rows(
    step: StepInput,
    target_tokens: Int32,
    verification_results: tuple[VerificationResult, ...] | None = None,
) -> CommittedRows:
    """The same of all requests, with the token behind each row; of tree chunks none.

    A prompt chunk's last row is left out where neither step nor `following_tokens` knows its token.
    """
    rows, ends = _path_rows(step, target_tokens, verification_results)
    if step.heads.chunk_requests:
        lengths = lengths_of(ends)
        is_whole = np.ones(len(ends), dtype=np.bool_)
        is_whole[list(step.heads.chunk_requests)] = False
        rows, ends = rows[is_whole.repeat(lengths)], (lengths * is_whole).cumsum()
    behind = NO_ROWS if step.heads.following_tokens is None else step.heads.following_tokens
    return CommittedRows(
        *with_following(rows, ends, step.token_ids, step.logits_rows, target_tokens, behind)
    )


def load_walk() -> None:
    """Compile the loops, or load them, so that no step waits for it."""
    rows, words = np.arange(2, dtype=np.int32), np.ones(1, dtype=np.int32)
    starts = np.array([0, 2], dtype=np.int32)
    masks = np.array([1, 3], dtype=np.uint64)
    walked = walk_rows(masks, words, words - 1, starts, rows, rows, rows, rows + 1)
    with_following(*walked, rows, rows, rows, NO_ROWS)


def _path_rows(
    step: StepInput,
    target_tokens: Int32,
    verification_results: tuple[VerificationResult, ...] | None,
) -> tuple[Int32, Int64]:
    """Committed rows of all requests, int32 [n], and where those of each end, int64 [requests]."""
    if verification_results is not None:
        return _decided_rows(step, verification_results)
    return walk_rows(
        *_flat_trees(step), step.request_starts, step.logits_rows, step.token_ids, step.positions,
        target_tokens,
    )  # fmt: skip


def _decided_rows(
    step: StepInput, verification_results: tuple[VerificationResult, ...]
) -> tuple[Int32, Int64]:
    starts, parts = step.request_starts.tolist(), [NO_ROWS]
    for request, tree in enumerate(step.trees):
        rows = np.arange(starts[request], starts[request + 1], dtype=np.int32)
        if tree is not None:
            path = verification_results[request].path
            rows = rows[[0, *(node + 1 for node in path)]]
        parts.append(rows)
    ends = np.array([len(rows) for rows in parts[1:]], dtype=np.int64).cumsum()
    return np.concatenate(parts), ends


def _flat_trees(step: StepInput) -> tuple[UInt64, Int32, Int32]:
    """The masks of a step's trees, as `walk_rows` takes them."""
    trees = step.trees
    words = np.zeros(len(trees), dtype=np.int32)
    num_before = np.zeros(len(trees), dtype=np.int32)
    if isinstance(trees, StepTrees):
        words[: trees.num_trees] = trees.shapes[:, 1]
        return trees.ancestors, words, num_before
    indices = [index for index, tree in enumerate(trees) if tree is not None]
    own: list[TreeRows] = [tree for tree in trees if tree is not None]
    words[indices] = [tree.ancestors.shape[1] for tree in own]
    num_before[indices] = [len(tree.slots) - len(tree.ancestors) for tree in own]
    none = [np.empty(0, dtype=np.uint64)]
    return np.concatenate(none + [tree.ancestors.ravel() for tree in own]), words, num_before


@compiled
def walk_rows(
    ancestors: UInt64,
    words: Int32,
    num_before: Int32,
    starts: Int32,
    logits_rows: Int32,
    tokens: Int32,
    positions: Int32,
    targets: Int32,
) -> tuple[Int32, Int64]:
    """Rows that are committed, int32 [n], and where those of each request end, int64 [requests].

    ancestors   uint64  rows of all trees, one behind the other, a bit a column
    words       int32 [requests]  of each row of a request's tree; 0: a prompt chunk
    num_before  int32 [requests]  columns before that of the tree's first row
    targets     int32 [len(logits_rows)]; of trees those of the root and the nodes, parents before
                children: rows of probes behind them have none
    """
    rows = np.empty(len(tokens), dtype=np.int32)
    ends = np.empty(len(words), dtype=np.int64)
    count, chosen, first_word = 0, 0, 0
    for request in range(len(words)):
        start, end, size = starts[request], starts[request + 1], words[request]
        first = chosen
        while chosen < len(logits_rows) and logits_rows[chosen] < end:
            chosen += 1
        last = 0
        for row in range(end - start if size == 0 else chosen - first):
            if size and row:
                column = num_before[request] + last
                word = ancestors[first_word + row * size + column // WORD_BITS]
                is_seen = (word >> np.uint64(column % WORD_BITS)) & np.uint64(1)
                # A row one position behind another that it sees is its child.
                is_child = is_seen and positions[start + row] == positions[start + last] + 1
                if not (is_child and tokens[start + row] == targets[first + last]):
                    continue
            rows[count] = start + row
            last = row
            count += 1
        first_word += (end - start) * size
        ends[request] = count
    return rows[:count], ends


@compiled
def with_following(
    rows: Int32, ends: Int64, tokens: Int32, logits_rows: Int32, targets: Int32, behind: Int32
) -> tuple[Int32, Int32, Int32]:
    """The fields of `CommittedRows`. `behind`: tokens that follow the last requests' rows."""
    known = np.empty(len(rows), dtype=np.int32)
    following = np.empty(len(rows), dtype=np.int32)
    starts = np.zeros(len(ends) + 1, dtype=np.int32)
    count, chosen, first, num_unknown = 0, 0, 0, len(ends) - len(behind)
    for request in range(len(ends)):
        for index in range(first, ends[request]):
            row, token = rows[index], -1
            if index + 1 < ends[request]:
                token = tokens[rows[index + 1]]
            else:
                if request >= num_unknown:
                    token = behind[request - num_unknown]
                while chosen < len(logits_rows) and logits_rows[chosen] < row:
                    chosen += 1
                is_chosen = chosen < len(logits_rows) and logits_rows[chosen] == row
                if token < 0 and is_chosen:
                    token = targets[chosen]
                if token < 0:
                    continue
            known[count], following[count] = row, token
            count += 1
        first = ends[request]
        starts[request + 1] = count
    return known[:count], following[:count], starts
