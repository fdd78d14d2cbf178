"""The sender's end: steps as differences against what the stages were sent before."""

from __future__ import annotations

import numpy as np

from ....core.steps import StepInput
from .edit_changes import SentEdits
from .kept_sampling import KeptSampling
from .kept_tables import KeptTables
from .request_slots import RequestSlots
from .step_difference import ChoiceDifference, RowsDifference, StepDifference, are_starts
from .tree_arrays import flatten_trees
from .typed_array import typed


class StepEncoder:
    """Knows what the stages of one run keep, and sends what differs.

    Stages that were replaced, or that may have missed a step, keep nothing that counts: they get a
    new encoder of another `epoch`. Nothing is taken for granted about a request either: each table
    is compared with the one that was sent, so whoever was preempted, or took over a slot, sends
    what it has anew.
    """

    __slots__ = ("_edits", "_epoch", "_sampling", "_serial", "_slots", "_tables")

    def __init__(self, epoch: int) -> None:
        """`epoch` differs from that of every run that the stages may remember."""
        self._epoch = epoch
        self._begin()

    def encode(self, step: StepInput) -> StepDifference:
        """The next message: what differs from the step before.

        Every message that is encoded must be sent, in order. Raises `TypeError` for what is no
        step; the next message holds everything then.
        """
        assert step.num_decode_steps == 1, "stages of other processes take a token a step"
        try:
            rows = self._rows(step)
            difference = StepDifference(self._epoch, self._serial, rows, self._choice(step, rows))
        except BaseException:
            self.forget()
            raise
        self._serial += 1
        return difference

    def forget(self) -> None:
        """The last message was not sent: the next one holds everything."""
        self._begin()

    def _begin(self) -> None:
        self._serial = 0
        self._slots = RequestSlots()
        self._tables = KeptTables()
        self._sampling = KeptSampling()
        self._edits = SentEdits()

    def _rows(self, step: StepInput) -> RowsDifference:
        starts = typed(step.request_starts, np.int32, 1, "request starts")
        num_requests, num_rows = len(step.trees), len(step.token_ids)
        is_whole = len(step.positions) == len(step.slots) == num_rows
        is_whole &= len(step.context_lens) == num_requests
        if not is_whole or not are_starts(starts, num_requests, num_rows):
            raise TypeError("rows and requests do not belong together")
        keys = step.request_keys or range(-1, -1 - num_requests, -1)
        if len(keys) != num_requests:
            raise TypeError("requests have no keys")
        slots = self._slots.place(keys)
        tables = typed(step.block_tables, np.int32, 2, "block tables")
        return RowsDifference(
            step_id=step.step_id,
            is_traced=step.is_traced,
            moves=step.moves,
            token_ids=step.token_ids,
            positions=typed(step.positions, np.int32, 1, "positions"),
            slots=step.slots,
            request_starts=starts,
            context_lens=step.context_lens,
            request_slots=slots,
            tables=self._tables.changes(slots, tables),
            trees=flatten_trees(step),
        )

    def _choice(self, step: StepInput, rows: RowsDifference) -> ChoiceDifference:
        logits_rows = typed(step.logits_rows, np.int32, 1, "logits rows")
        if len(logits_rows) and not 0 <= logits_rows.min() <= logits_rows.max() < len(rows.slots):
            raise TypeError("logits are of no row")
        return ChoiceDifference(
            logits_rows=logits_rows,
            sampling=self._sampling.changes(rows, logits_rows, step.sampling),
            probe_rows=step.probe_rows,
            probe_top_k=step.probe_top_k,
            scored_rows=step.scored_rows,
            scored_tokens=step.scored_tokens,
            with_log_probs=step.with_log_probs,
            with_entropies=step.with_entropies,
            num_top=step.num_top,
            verification=step.verification,
            edits=self._edits.changes(step.edits, rows.slots_of(logits_rows)),
            feature_requests=step.feature_requests,
            slice_requests=step.slice_requests,
            head_tasks=step.head_tasks,
            following_tokens=step.following_tokens,
            request_keys=step.request_keys if step.head_tasks else (),
        )
