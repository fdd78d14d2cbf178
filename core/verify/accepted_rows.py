"""The acceptance walk beside the logits: which rows of a step are committed, found from the step
itself, so that the last stage knows whose hidden states to hand out.

All requests of a step go through one compiled loop over flat arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..arrays import Int32, Int64, UInt64, lengths_of
from ..compiled import compiled
from ..steps import NO_ROWS, WORD_BITS, StepInput, StepTrees, TreeRows, VerificationResult


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

    They are those of `paths_of` (`core/verify/walk.py`), found without the tree's parents.
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
    for place in step.heads.feature_requests:
        if place in step.heads.chunk_requests:
            first, end = np.searchsorted(chosen, starts[place : place + 2])
            wanted.append(chosen[first:end])
        else:
            wanted.append(rows[ends[place - 1] if place else 0 : ends[place]])
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
    places = [place for place, tree in enumerate(trees) if tree is not None]
    own: list[TreeRows] = [tree for tree in trees if tree is not None]
    words[places] = [tree.ancestors.shape[1] for tree in own]
    num_before[places] = [len(tree.slots) - len(tree.ancestors) for tree in own]
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
