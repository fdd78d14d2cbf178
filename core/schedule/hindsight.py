"""Drafted trees, judged by the tokens that follow, whether their nodes were verified or not.

Under `coupled` the target's next tokens depend on nothing that was drafted, so every node is known
to be right or wrong once its request has come there. What is learned so does not depend on what was
bought: nothing seems worthless because it was never tried. Formula:
docs/how-it-works.md, "Acceptance estimates".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays import Float32, Float64, Int32, Int64
from ..compiled import compiled
from ..tree.acceptance_table import record
from ..tree.hazards import edge
from ..tree.kernels import DEPTH, DRAFTER, NODE, PARENT, RANK, TOKEN
from ..tree.tree import TreeBatch
from ..verify.walk import Paths

# Requests that there is room for at first.
FIRST_SLOTS = 64


class Pending(NamedTuple):
    """The tree of each slot that is being judged.

    nodes         int32 [slots, most nodes, 4]  as of `TokenTree`; so are values, attributions and
                  attribution_log_probs
    sizes         int64 [slots, 2]  nodes and attributions; none where nothing waits
    at            int64 [slots]  the node that the text has come to; -1: the root
    """

    nodes: Int32
    values: Float64
    attributions: Int32
    log_probs: Float32
    sizes: Int64
    at: Int64


class Hindsight:
    """One drafted tree of each request at a time, until the text has left it."""

    __slots__ = ("_free", "_pending", "_slots")

    def __init__(self) -> None:
        self._pending = _room(FIRST_SLOTS, 1, 1)
        self._slots: dict[str, int] = {}
        self._free = list(range(FIRST_SLOTS))

    def has_work(self, drafted: TreeBatch) -> bool:
        """Whether a tree waits for its text, or is among those `drafted`."""
        return bool(len(drafted.values) or self._pending.sizes.any())

    def judge(
        self,
        ids: Sequence[str],
        drafted: TreeBatch,
        paths: Paths,
        counts: Float64,
        ratios: Float64,
    ) -> Float64:
        """Learn from the tokens of `paths`, which follow the roots of `drafted`.

        counts  of the `AcceptanceTable` of the trees
        ratios  float64 [requests]  the hazard ratios so far
        Returns float64 [requests, 2]: how often the most probable node was wrong, and the hazard
        that was gone through.
        """
        slots = self._slots_of(ids, drafted, paths.ends)
        self._make_room(drafted)
        take(self._pending, slots, drafted.nodes, drafted.values, drafted.attributions,
             drafted.attribution_log_probs, drafted.ends)  # fmt: skip
        return judge(self._pending, slots, paths.tokens, paths.ends, counts, ratios)

    def forget(self, request_id: str) -> None:
        """The request has ended; an unknown id is ignored."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._pending.sizes[slot] = 0
            self._free.append(slot)

    def _slots_of(self, ids: Sequence[str], drafted: TreeBatch, token_ends: Int64) -> Int64:
        """int64 [requests]: -1 for those that nothing was ever drafted for."""
        slots = np.array([self._slots.get(one, -1) for one in ids], dtype=np.int64)
        for place in map(int, newcomers(slots, drafted.node_ends, token_ends)):
            slots[place] = self._slots[ids[place]] = self._new_slot()
        return slots

    def _new_slot(self) -> int:
        if not self._free:
            count = len(self._pending.at)
            self._grow(2 * count, *self._most)
            self._free = list(range(count, 2 * count))
        return self._free.pop()

    def _make_room(self, drafted: TreeBatch) -> None:
        sizes = largest(drafted.ends)
        if any(size > most for size, most in zip(sizes, self._most, strict=True)):
            self._grow(len(self._pending.at), *map(max, sizes, self._most))

    @property
    def _most(self) -> tuple[int, int]:
        return self._pending.nodes.shape[1], self._pending.attributions.shape[1]

    def _grow(self, num_slots: int, num_nodes: int, num_attributions: int) -> None:
        room = _room(num_slots, num_nodes, num_attributions)
        for old, new in zip(self._pending, room, strict=True):
            new[tuple(map(slice, old.shape))] = old
        self._pending = room


def _room(num_slots: int, num_nodes: int, num_attributions: int) -> Pending:
    return Pending(
        np.zeros((num_slots, num_nodes, 4), dtype=np.int32),
        np.zeros((num_slots, num_nodes)),
        np.zeros((num_slots, num_attributions, 3), dtype=np.int32),
        np.zeros((num_slots, num_attributions), dtype=np.float32),
        np.zeros((num_slots, 2), dtype=np.int64),
        np.full(num_slots, -1, dtype=np.int64),
    )


@compiled
def newcomers(slots: Int64, node_ends: Int64, token_ends: Int64) -> Int64:
    """The places of requests without a slot that have a tree; one without tokens may have ended."""
    found = np.empty(len(slots), dtype=np.int64)
    count, node, token = 0, 0, 0
    for place in range(len(slots)):
        if slots[place] < 0 and node_ends[place] > node and token_ends[place] > token:
            found[count] = place
            count += 1
        node, token = node_ends[place], token_ends[place]
    return found[:count]


@compiled
def largest(ends: Int64) -> tuple[int, int]:
    """Most nodes, and most attributions, of one tree; `ends` as of `TreeBatch`."""
    most_nodes, most_attributions = 0, 0
    nodes_before, attributions_before = 0, 0
    for tree in range(ends.shape[1]):
        most_nodes = max(most_nodes, ends[0, tree] - nodes_before)
        most_attributions = max(most_attributions, ends[1, tree] - attributions_before)
        nodes_before, attributions_before = ends[0, tree], ends[1, tree]
    return most_nodes, most_attributions


@compiled
def take(  # noqa: PLR0913, PLR0917 - compiled functions take no options by name
    pending: Pending,
    slots: Int64,
    nodes: Int32,
    values: Float64,
    attributions: Int32,
    log_probs: Float32,
    ends: Int64,
) -> None:
    """Keep the trees of requests that nothing waits for; arguments as of `TreeBatch`."""
    first, first_attribution = 0, 0
    for tree in range(ends.shape[1]):
        end, attribution_end = ends[0, tree], ends[1, tree]
        slot, size, count = slots[tree], end - first, attribution_end - first_attribution
        if slot >= 0 and size and not pending.sizes[slot, 0]:
            pending.nodes[slot, :size] = nodes[first:end]
            pending.values[slot, :size] = values[first:end]
            pending.attributions[slot, :count] = attributions[first_attribution:attribution_end]
            pending.log_probs[slot, :count] = log_probs[first_attribution:attribution_end]
            pending.sizes[slot, 0], pending.sizes[slot, 1] = size, count
            pending.at[slot] = -1
        first, first_attribution = end, attribution_end


@compiled
def judge(  # noqa: PLR0917 - compiled functions take no options by name
    pending: Pending,
    slots: Int64,
    tokens: Int32,
    token_ends: Int64,
    counts: Float64,
    ratios: Float64,
) -> Float64:
    """Follow each request's tokens through its tree; see `Hindsight.judge`."""
    judged = np.zeros((len(slots), 2))
    first = 0
    for index in range(len(slots)):
        slot = slots[index]
        for place in range(first, token_ends[index]):
            if slot < 0 or not pending.sizes[slot, 0]:
                break
            _judge_token(pending, slot, tokens[place], counts, ratios[index], judged[index])
        first = token_ends[index]
    return judged


@compiled
def _judge_token(  # noqa: PLR0917 - compiled functions take no options by name
    pending: Pending, slot: int, token: int, counts: Float64, ratio: float, judged: Float64
) -> None:
    """Judge the children of the node that the text has come to, and go on to the right one."""
    at, nodes = pending.at[slot], pending.nodes[slot, : pending.sizes[slot, 0]]
    depth = 1 if at < 0 else nodes[at, DEPTH] + 1
    for place in range(pending.sizes[slot, 1]):
        attribution = pending.attributions[slot, place]
        node = nodes[attribution[NODE]]
        if node[PARENT] == at:
            log_prob, rank = pending.log_probs[slot, place], attribution[RANK]
            record(counts, attribution[DRAFTER], log_prob, depth, rank, node[TOKEN] == token)
    values = pending.values[slot]
    right, best = -1, -1
    for index in range(len(nodes)):
        if nodes[index, PARENT] == at:
            if nodes[index, TOKEN] == token:
                right = index
            if best < 0 or values[index] > values[best]:
                best = index
    hazard = -np.log(edge(values, nodes, best))
    is_wrong = right != best
    judged[0] += is_wrong
    judged[1] += _survived(hazard, ratio) if is_wrong else hazard
    pending.at[slot] = right
    if right < 0 or not _has_children(nodes, right):
        pending.sizes[slot] = 0


@compiled
def _has_children(nodes: Int32, node: int) -> bool:
    for index in range(node + 1, len(nodes)):  # noqa: SIM110 - compiled loops know no `any`
        if nodes[index, PARENT] == node:
            return True
    return False


@compiled
def _survived(hazard: float, ratio: float) -> float:
    """The expected part of a hazard that was gone through before the failure within it."""
    return 1.0 / ratio - hazard / np.expm1(ratio * hazard)
