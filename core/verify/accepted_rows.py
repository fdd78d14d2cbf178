"""The acceptance walk beside the logits: which rows of a step are committed, told from the step
itself, so that the last stage knows whose hidden states to hand out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..arrays import Int32, UInt64
from ..compiled import compiled
from ..steps import WORD_BITS, StepInput, TreeRows, VerificationResult

NO_ROWS = np.empty(0, dtype=np.int32)


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
    prompt chunk, a tree's root and its accepted nodes.

    They are those of `paths_of` (`core/verify/walk.py`), found without the tree's parents.
    `verification_results`: of the step's rule, where another one than `coupled` decides.
    """
    return np.concatenate(
        [NO_ROWS]
        + [
            _rows_of(step, request, target_tokens, verification_results)
            for request in step.feature_requests
        ]
    )


def committed_rows(
    step: StepInput,
    target_tokens: Int32,
    verification_results: tuple[VerificationResult, ...] | None = None,
) -> CommittedRows:
    """The same of all requests, with the token behind each row.

    A prompt chunk's last row is left out where neither step nor `following_tokens` knows its token.
    """
    rows, following, starts = [NO_ROWS], [NO_ROWS], [0]
    num_trees = sum(tree is not None for tree in step.trees)
    for request in range(len(step.trees)):
        own = _rows_of(step, request, target_tokens, verification_results)
        last = int(own[-1])
        behind = -1
        place = int(np.searchsorted(step.logits_rows, last))
        if step.following_tokens is not None and request >= num_trees:
            behind = int(step.following_tokens[request - num_trees])
        if behind < 0 and place < len(step.logits_rows) and step.logits_rows[place] == last:
            behind = int(target_tokens[place])
        known = own if behind >= 0 else own[:-1]
        rows.append(known)
        following += [step.token_ids[own[1:]], np.array([behind], dtype=np.int32)[: behind >= 0]]
        starts.append(starts[-1] + len(known))
    return CommittedRows(
        np.concatenate(rows), np.concatenate(following), np.array(starts, dtype=np.int32)
    )


def _rows_of(
    step: StepInput,
    request: int,
    target_tokens: Int32,
    verification_results: tuple[VerificationResult, ...] | None,
) -> Int32:
    start, end = step.request_starts[request : request + 2].tolist()
    tree = step.trees[request]
    if tree is None:
        own = np.arange(end - start, dtype=np.int32)
    elif verification_results is not None:
        path = verification_results[request].path
        own = np.array([0, *(node + 1 for node in path)], dtype=np.int32)
    else:
        own = _walked(step, target_tokens, tree, start, end)
    return own + np.int32(start)


def _walked(step: StepInput, target_tokens: Int32, tree: TreeRows, start: int, end: int) -> Int32:
    # Behind the root and the nodes stand rows of probes, which get no target.
    first, last = np.searchsorted(step.logits_rows, (start, end)).tolist()
    own = slice(start, start + last - first)
    num_before = len(tree.slots) - (end - start)
    return follow_ancestors(
        tree.ancestors,
        num_before,
        step.token_ids[own],
        step.positions[own],
        target_tokens[first:last],
    )


@compiled
def follow_ancestors(
    ancestors: UInt64, num_before: int, tokens: Int32, positions: Int32, targets: Int32
) -> Int32:
    """Rows int32 [n] of a tree that its targets go through, from the root's row 0 on.

    ancestors   uint64 [rows, words]  a bit a column, of which row i is column `num_before + i`
    tokens, positions, targets  int32 [rows]  of the root and the nodes, parents before children
    """
    path = np.empty(len(tokens), dtype=np.int32)
    path[0] = 0
    count, last = 1, 0
    for row in range(1, len(tokens)):
        column = num_before + last
        bit = (ancestors[row, column // WORD_BITS] >> np.uint64(column % WORD_BITS)) & np.uint64(1)
        # A row one position behind another that it sees is its child.
        is_child = bit and positions[row] == positions[last] + 1
        if is_child and tokens[row] == targets[last]:
            path[count] = last = row
            count += 1
    return path[:count]
