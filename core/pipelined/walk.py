"""The acceptance walk through chunks of a pipelined tree, each from where those before it left it.

A chunk's nodes may go on from nodes of chunks in flight, so the walk through it begins at the last
row that these committed, whose KV slot the chunk's rows see. Whoever computes the steps in order
knows so much of every text without the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..arrays import Int32
from ..steps import WORD_BITS, StepInput

# Requests whose walks are kept; those that were walked longest ago are let go.
MOST_REQUESTS = 64


class WalkedRow(NamedTuple):
    """A committed row: its KV slot and position, and the token behind it."""

    slot: int
    position: int
    following: int


class ChunkWalk(NamedTuple):
    """What is committed of a pipelined request with its chunk in a step.

    rows        from the chunk's root on
    num_known    first ones that came with chunks before; 0: nothing of the tree was on its way
    num_passed  rows before these that the root has gone over since the chunk before
    walked      rows of the step among them, but its root
    at_leaf     whether the chunk has nodes, and none goes on from where the walk is
    """

    rows: Sequence[WalkedRow]
    num_known: int
    num_passed: int
    walked: Sequence[int]
    at_leaf: bool


class PipelinedWalks:
    """Follows pipelined requests from chunk to chunk, by their keys."""

    __slots__ = ("_forget", "_rows")

    def __init__(self, forget: Callable[[int], object] = lambda _: None) -> None:
        """`forget`: called with the key of a request that is let go."""
        self._forget = forget
        self._rows: dict[int, Sequence[WalkedRow]] = {}

    def clear(self) -> None:
        """Forget all requests."""
        self._rows.clear()

    def move(self, moves: Int32) -> None:
        """KV was copied between slots, int32 [m, 2] (from, to); all were read first."""
        targets = dict(moves.tolist())
        for key, rows in self._rows.items():
            if any(row.slot in targets for row in rows):
                self._rows[key] = [
                    row._replace(slot=targets.get(row.slot, row.slot)) for row in rows
                ]

    def follow(self, step: StepInput, request: int, target_tokens: Int32) -> ChunkWalk:
        """The walk through a request's chunk; target_tokens int32 [len(logits_rows)]."""
        key = step.request_keys[request]
        root = _row_at(step, int(step.request_starts[request]), target_tokens)
        before = self._rows.pop(key, ())
        num_passed = root.position - before[0].position if before else 0
        # The root is computed anew where it belongs.
        rows = [root, *before[num_passed + 1 :]]
        num_known = len(rows)
        if not before or before[-1].position < root.position:
            num_known = num_passed = 0
        walked, at_leaf = _walk(step, request, target_tokens, rows)
        self._rows[key] = rows
        if len(self._rows) > MOST_REQUESTS:
            oldest = next(iter(self._rows))
            del self._rows[oldest]
            self._forget(oldest)
        return ChunkWalk(rows, num_known, num_passed, walked, at_leaf)


def _walk(
    step: StepInput, request: int, target_tokens: Int32, rows: list[WalkedRow]
) -> tuple[list[int], bool]:
    """Go on from the last of the rows; `ChunkWalk.walked` and `at_leaf`."""
    first, last = step.request_starts[request : request + 2]
    # Rows of probes belong to no tree: they have no target token.
    choosing = slice(*np.searchsorted(step.logits_rows, (first, last)))
    nodes = step.logits_rows[choosing][1:]
    walked = list[int]()
    while True:
        end = rows[-1]
        below = nodes[step.positions[nodes] == end.position + 1].tolist()
        children = [row for row in below if _sees(step, request, row, end.slot)]
        following = [row for row in children if step.token_ids[row] == end.following]
        if not following:
            return walked, bool(len(nodes)) and not children
        # Siblings never share a token.
        [row] = following
        rows.append(_row_at(step, row, target_tokens))
        walked.append(row)


def _row_at(step: StepInput, row: int, target_tokens: Int32) -> WalkedRow:
    chosen = int(np.searchsorted(step.logits_rows, row))
    return WalkedRow(int(step.slots[row]), int(step.positions[row]), int(target_tokens[chosen]))


def _sees(step: StepInput, request: int, row: int, slot: int) -> bool:
    tree = step.trees[request]
    assert tree is not None, "chunks are trees"
    mask = tree.ancestors[row - step.request_starts[request]]
    return any(
        mask[column // WORD_BITS] >> np.uint64(column % WORD_BITS) & np.uint64(1)
        for column in np.flatnonzero(tree.slots == slot).tolist()
    )
