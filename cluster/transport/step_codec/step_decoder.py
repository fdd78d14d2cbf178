"""A stage's end: whole steps from differences."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from ....core.arrays import Int32
from ....core.errors import ProtocolError
from ....core.reach import AT_LEAVES, EVERY_REACH
from ....core.steps import HeadTask, SamplingRows, StepInput
from .edit_changes import ReceivedEdits
from .kept_sampling import KeptSampling
from .kept_tables import KeptTables
from .step_difference import ChoiceDifference, RowsDifference, StepDifference, are_starts
from .tree_arrays import split_trees
from .typed_array import expect, expect_flat

NONE = np.empty(0, dtype=np.int32)
# Requests of a step, and requests that are kept, are fewer.
MAX_SLOTS = 1 << 16
NO_CHOICE: dict[str, Any] = {
    "logits_rows": NONE,
    "sampling": SamplingRows.greedy(np.empty(0, dtype=np.int64)),
    "probe_rows": NONE,
    "probe_top_k": 0,
    "scored_rows": NONE,
    "scored_tokens": NONE,
}


class StepDecoder:
    """Keeps what a `StepEncoder` sends, by request slot, and makes whole steps again.

    A message against another one than the last it got raises `ProtocolError`, and so does
    everything behind it up to a message that begins anew: a step is right or it is none.
    """

    __slots__ = ("_edits", "_epoch", "_sampling", "_serial", "_tables")

    def __init__(self) -> None:
        self._begin(None)

    def decode(self, difference: StepDifference) -> StepInput:
        """The step that was encoded, without `request_keys`.

        Without a `choice` it has rows alone: nothing to choose, to probe or to score. Raises
        `ProtocolError` for what no `StepEncoder` has made of a step, or not as the next message.
        """
        if difference.serial == 0:
            self._begin(difference.epoch)
        if self._epoch is None or (self._epoch, self._serial) != (
            difference.epoch,
            difference.serial,
        ):
            raise ProtocolError(
                f"step {difference.rows.step_id} is a difference against message "
                f"{difference.serial - 1} of epoch {difference.epoch}, which is not the last here"
            )
        epoch, self._epoch = self._epoch, None
        step = self._decoded(difference.rows, difference.choice)
        self._epoch, self._serial = epoch, self._serial + 1
        return step

    def _begin(self, epoch: int | None) -> None:
        self._epoch = epoch
        self._serial = 0
        self._tables = KeptTables()
        self._sampling = KeptSampling()
        self._edits = ReceivedEdits()

    def _decoded(self, rows: RowsDifference, choice: ChoiceDifference | None) -> StepInput:
        _check(rows)
        return StepInput(
            step_id=rows.step_id,
            moves=rows.moves,
            token_ids=rows.token_ids,
            positions=rows.positions,
            slots=rows.slots,
            request_starts=rows.request_starts,
            context_lens=rows.context_lens,
            block_tables=self._tables.apply(rows.request_slots, rows.tables),
            trees=split_trees(rows),
            is_traced=rows.is_traced,
            **(NO_CHOICE if choice is None else self._chosen(rows, choice)),
        )

    def _chosen(self, rows: RowsDifference, choice: ChoiceDifference) -> dict[str, Any]:
        logits_rows = choice.logits_rows
        expect_flat("logits rows", logits_rows)
        if len(logits_rows):
            fits = logits_rows.min() >= 0 and logits_rows.max() < len(rows.token_ids)
            expect(fits, "logits are of no row")
        return {
            "logits_rows": logits_rows,
            "sampling": self._sampling.apply(rows, logits_rows, choice.sampling),
            "probe_rows": choice.probe_rows,
            "probe_top_k": choice.probe_top_k,
            "scored_rows": choice.scored_rows,
            "scored_tokens": choice.scored_tokens,
            "with_log_probs": choice.with_log_probs,
            "with_entropies": choice.with_entropies,
            "num_top": choice.num_top,
            "verification": choice.verification,
            "edits": self._edits.apply(choice.edits, rows.slots_of(logits_rows)),
            "feature_requests": _places(choice.feature_requests, len(rows.context_lens)),
            "slice_requests": _places(choice.slice_requests, len(rows.context_lens)),
            "head_tasks": _tasks(choice, len(rows.context_lens)),
            "following_tokens": _following(choice, len(rows.context_lens)),
            "request_keys": _keys(choice, len(rows.context_lens)),
        }


def _tasks(choice: ChoiceDifference, num_requests: int) -> tuple[HeadTask, ...]:
    tasks = choice.head_tasks
    for task in tasks:
        _places(task.places, num_requests)
        fits = len(task.places) == len(task.max_nodes) and all(n >= 0 for n in task.max_nodes)
        expect(fits, "a head is to draft no tree")
        is_known = all(0 <= reaches <= EVERY_REACH | AT_LEAVES for reaches in task.reaches)
        fits = len(task.places) == len(task.reaches) and is_known
        expect(fits, "a head is to draft after no outcome")
        expect(task.level_tokens >= 0.0, "levels of a head's drafts take less than nothing")
    return tasks


def _keys(choice: ChoiceDifference, num_requests: int) -> tuple[int, ...]:
    wanted = num_requests if choice.head_tasks else 0
    expect(len(choice.request_keys) == wanted, "keys are of no request")
    return choice.request_keys


def _following(choice: ChoiceDifference, num_requests: int) -> Int32 | None:
    tokens = choice.following_tokens
    if tokens is None:
        expect(not choice.head_tasks, "heads are not told what follows")
    else:
        expect_flat("following tokens", tokens)
        expect(len(tokens) <= num_requests, "tokens follow no prompt")
    return tokens


def _places(places: tuple[int, ...], num_requests: int) -> tuple[int, ...]:
    rising = all(first < second for first, second in pairwise((-1, *places, num_requests)))
    expect(rising, "features or drafts are of no request")
    return places


def _check(rows: RowsDifference) -> None:
    """Raise `ProtocolError` unless rows, requests and slots belong together."""
    slots = rows.request_slots
    expect_flat("rows", rows.token_ids, rows.positions, rows.slots, rows.context_lens, slots)
    num_requests, num_rows = len(rows.context_lens), len(rows.token_ids)
    are_whole = len(rows.positions) == len(rows.slots) == num_rows
    are_whole &= are_starts(rows.request_starts, num_requests, num_rows)
    expect(are_whole and len(slots) == num_requests, "rows are of no request")
    expect(all(0 <= slot < MAX_SLOTS for slot in slots.tolist()), "requests have no slot")
