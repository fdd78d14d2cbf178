"""A stage's end: whole steps from deltas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....core.arrays import Int32, Int64, UInt32
from ....core.compiled import compiled
from ....core.errors import ProtocolError
from ....core.steps import (
    AT_LEAVES,
    EVERY_LENGTH_BUCKET,
    NO_HEADS,
    NO_LOG_PROBS,
    NO_PROBES,
    HeadInput,
    HeadTask,
    LogitEdits,
    Penalties,
    SamplingRows,
    StepInput,
    TreeRows,
)
from .step_delta import (
    AS_KEPT,
    MAX_ENTRIES,
    NO_INTS,
    NO_TREE,
    NONE,
    CachedEdits,
    ChoiceDelta,
    EditChanges,
    MaskChanges,
    RowsDelta,
    StepDelta,
    TableChanges,
    TreeArrays,
    are_starts,
    ends_of,
    expect,
    expect_flat,
    with_columns,
    with_room,
)

NUM_HEADS, MASK_ROWS = 8, 7
# Requests of a step, and requests that are kept, are fewer.
MAX_SLOTS = 1 << 16
NO_CHOICE: dict[str, Any] = {
    "logits_rows": NO_INTS,
    "sampling": SamplingRows.greedy(np.empty(0, dtype=np.int64)),
}

Arrays = list[NDArray[Any]]


class StepDecoder:
    """Keeps what a `StepEncoder` sends, by request slot, and makes whole steps again.

    A delta against any message but the last raises `ProtocolError`, as do all messages after it, up
    to one of serial 0.
    """

    __slots__ = ("_edits", "_epoch", "_serial", "_tables")

    def __init__(self) -> None:
        self._begin(None)

    def decode(self, delta: StepDelta) -> StepInput:
        """The step that was encoded, without `request_keys`.

        Without a `choice` it has rows alone: nothing to choose, to probe or to score. Raises
        `ProtocolError` for what no `StepEncoder` has made of a step, or not as the next message.
        """
        if delta.serial == 0:
            self._begin(delta.epoch)
        if self._epoch is None or (self._epoch, self._serial) != (
            delta.epoch,
            delta.serial,
        ):
            raise ProtocolError(
                f"step {delta.rows.step_id} is a delta against message "
                f"{delta.serial - 1} of epoch {delta.epoch}, which is not the last here"
            )
        epoch, self._epoch = self._epoch, None
        step = self._decoded(delta.rows, delta.choice)
        self._epoch, self._serial = epoch, self._serial + 1
        return step

    def _begin(self, epoch: int | None) -> None:
        self._epoch = epoch
        self._serial = 0
        self._tables = ReceivedTables()
        self._edits = ReceivedEdits()

    def _decoded(self, rows: RowsDelta, choice: ChoiceDelta | None) -> StepInput:
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
            state_slots=rows.state_slots,
            state_loads=rows.state_loads,
            state_saves=rows.state_saves,
            is_traced=rows.is_traced,
            **(NO_CHOICE if choice is None else self._chosen(rows, choice)),
        )

    def _chosen(self, rows: RowsDelta, choice: ChoiceDelta) -> dict[str, Any]:
        logits_rows = choice.logits_rows
        expect_flat("logits rows", logits_rows)
        if len(logits_rows):
            fits = logits_rows.min() >= 0 and logits_rows.max() < len(rows.token_ids)
            expect(fits, "logits are of no row")
        return {
            "logits_rows": logits_rows,
            "sampling": _checked_sampling(choice.sampling, len(logits_rows)),
            "edits": self._edits.apply(choice.edits, rows.slots_of(logits_rows)),
            "verification": choice.verification,
            "log_probs": choice.log_probs or NO_LOG_PROBS,
            "probes": choice.probes or NO_PROBES,
            "heads": _checked_heads(choice, len(rows.context_lens)),
            "request_keys": choice.request_keys,
        }


def _checked_sampling(sampling: SamplingRows, num_rows: int) -> SamplingRows:
    for column in fields(sampling):
        expect(getattr(sampling, column.name).shape == (num_rows,), "sampling is of other rows")
    return sampling


def _checked_heads(choice: ChoiceDelta, num_requests: int) -> HeadInput:
    heads = choice.heads or NO_HEADS
    num_keys = num_requests if heads.tasks else 0
    expect(len(choice.request_keys) == num_keys, "keys are of no request")
    _check_places(heads.feature_requests, num_requests)
    _check_places(heads.chunk_requests, num_requests)
    _check_tasks(heads.tasks, num_requests)
    if heads.following_tokens is None:
        expect(not heads.tasks, "heads lack the tokens after the prompt chunks")
    else:
        expect_flat("following tokens", heads.following_tokens)
        expect(len(heads.following_tokens) <= num_requests, "tokens follow no prompt")
    return heads


def _check_tasks(tasks: tuple[HeadTask, ...], num_requests: int) -> None:
    for task in tasks:
        _check_places(task.requests, num_requests)
        fits = len(task.requests) == len(task.max_nodes) and all(n >= 0 for n in task.max_nodes)
        expect(fits, "a head is to draft no tree")
        is_known = all(
            0 <= length_buckets <= EVERY_LENGTH_BUCKET | AT_LEAVES
            for length_buckets in task.length_buckets
        )
        fits = len(task.requests) == len(task.length_buckets) and is_known
        expect(fits, "a head is to draft after no outcome")
        expect(task.level_tokens >= 0.0, "levels of a head's drafts take less than nothing")


def _check_places(places: tuple[int, ...], num_requests: int) -> None:
    rising = all(first < second for first, second in pairwise((-1, *places, num_requests)))
    expect(rising, "features or drafts are of no request")


def _check(rows: RowsDelta) -> None:
    """Raise `ProtocolError` unless rows, requests and slots belong together."""
    slots = rows.request_slots
    expect_flat("rows", rows.token_ids, rows.positions, rows.slots, rows.context_lens, slots)
    num_requests, num_rows = len(rows.context_lens), len(rows.token_ids)
    are_whole = len(rows.positions) == len(rows.slots) == num_rows
    are_whole &= are_starts(rows.request_starts, num_requests, num_rows)
    expect(are_whole and len(slots) == num_requests, "rows are of no request")
    expect(all(0 <= slot < MAX_SLOTS for slot in slots.tolist()), "requests have no slot")
    expect_flat("state slots", rows.state_slots)
    states = set(rows.state_slots.tolist())
    are_whole = len(rows.state_slots) in (0, num_requests) and len(states) == len(rows.state_slots)
    expect(are_whole and all(slot >= 0 for slot in states), "states are of other requests")
    for copies, own in ((rows.state_loads, 1), (rows.state_saves, 0)):
        expect(copies.ndim == 2 and copies.shape[1] == 2, "states are copied nowhere")
        expect(states.issuperset(copies[:, own].tolist()), "copied states are of other requests")
        expect(all(slot >= 0 for slot in copies.ravel().tolist()), "states have no slot")


def split_trees(rows: RowsDelta) -> tuple[TreeRows | None, ...]:
    """The trees of a step whose rows were checked.

    Raises `ProtocolError` for what `flatten_trees` cannot have made.
    """
    num_requests, arrays = len(rows.context_lens), rows.trees
    if arrays is None:
        return (None,) * num_requests
    shapes = arrays.shapes
    expect_flat("trees", arrays.ancestors)
    expect(shapes.shape == (num_requests, 2), "trees are of other requests")
    places = np.flatnonzero(shapes[:, 0] != NO_TREE[0])
    sizes = [(rows, words) for rows, words in shapes.tolist() if rows != NO_TREE[0]]
    expect(all(rows >= 0 and words >= 0 for rows, words in sizes), "trees have sizes below 0")
    ends = list(accumulate(rows * words for rows, words in sizes))
    expect((ends[-1] if ends else 0) == len(arrays.ancestors), "trees are cut short")
    columns = _columns(rows, arrays, places)
    trees: list[TreeRows | None] = [None] * num_requests
    parts = zip(places.tolist(), sizes, [0, *ends], ends, columns, strict=False)
    for place, shape, first, end, (slots, positions) in parts:
        trees[place] = TreeRows(arrays.ancestors[first:end].reshape(shape), slots, positions)
    return tuple(trees)


def _columns(rows: RowsDelta, arrays: TreeArrays, places: Int64) -> Sequence[tuple[Int32, Int32]]:
    """Slots and positions of the columns of each tree."""
    columns = arrays.columns
    if columns is None:
        slots, positions = rows.slots, rows.positions
        firsts = rows.request_starts[places].tolist()
        ends = rows.request_starts[places + 1].tolist()
    else:
        slots, positions = columns.slots, columns.positions
        expect_flat("trees", columns.counts, slots, positions)
        expect(len(columns.counts) == len(places), "columns are of other trees")
        expect(len(slots) == len(positions), "columns have no position")
        ends = ends_of(columns.counts, len(slots), "columns")
        firsts = [0, *ends]
    pairs = zip(firsts, ends, strict=False)
    return [(slots[first:end], positions[first:end]) for first, end in pairs]


class ReceivedTables:
    """The block tables of each slot: int32 [slots, columns], zeros at first."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept = np.zeros((0, 0), dtype=np.int32)

    def apply(self, slots: Int32, changes: TableChanges) -> Int32:
        """The block tables that the other end's `changes` was given.

        Raises `ProtocolError` for what it cannot have made.
        """
        spans, blocks, width = changes.spans, changes.blocks, changes.width
        expect_flat("block tables", blocks)
        expect(spans.shape == (2, len(slots)), "block tables are of other requests")
        highest = max(*slots.tolist(), len(self._kept) - 1, 0) + 1
        expect(0 <= width <= MAX_ENTRIES // highest, f"block tables of {width} columns")
        are_whole = _are_spans(spans, width, len(blocks))
        expect(are_whole, "block tables are cut short, too many, or longer than wide")
        self._kept = with_columns(self._kept, slots, width)
        return _with_changes(self._kept, slots, spans, blocks, width)


@compiled
def _are_spans(spans: Int32, width: int, num_blocks: int) -> bool:
    """Whether these columns are within tables of this width, and so many together."""
    firsts, counts = spans
    total = 0
    for place in range(len(firsts)):
        first, count = firsts[place], counts[place]
        if first < 0 or count < 0 or np.int64(first) + count > width:
            return False
        total += count
    return total == num_blocks


@compiled
def _with_changes(kept: Int32, slots: Int32, spans: Int32, blocks: Int32, width: int) -> Int32:
    """Write the columns that differ; the tables as they are then."""
    firsts, counts = spans
    tables = np.empty((len(slots), width), dtype=np.int32)
    done = 0
    for place in range(len(slots)):
        row = kept[slots[place]]
        for column in range(firsts[place], firsts[place] + counts[place]):
            row[column] = blocks[done]
            done += 1
        tables[place] = row[:width]
    return tables


class ReceivedEdits:
    """The receiver's end."""

    __slots__ = ("_kept", "_masks")

    def __init__(self) -> None:
        self._kept: defaultdict[int, CachedEdits] = defaultdict(CachedEdits)
        self._masks = ReceivedMasks()

    def apply(self, changes: EditChanges | None, row_slots: Int32) -> tuple[LogitEdits, ...]:
        """The edits that the other end's `changes` was given.

        The tokens of their penalties are the kept ones, which the next call changes. Raises
        `ProtocolError` for what the other end cannot have made.
        """
        if changes is None:
            return ()
        heads = changes.heads
        expect(heads.ndim == 2 and heads.shape[1] == NUM_HEADS, "edits have no heads")
        num_masks = heads[:, MASK_ROWS]
        is_masked = num_masks != NONE
        expect(is_masked.any() == (changes.masks is not None), "edits have no masks")
        masks = iter(
            () if changes.masks is None else self._masks.apply(changes.masks, num_masks[is_masked])
        )
        num_factors = np.count_nonzero(heads[:, 3] != NONE)
        expect(changes.factors.shape == (num_factors, 3), "penalties have no factors")
        factors = iter(changes.factors.tolist())
        edits = []
        for head, *parts in zip(heads.tolist(), *_parts_of(changes), strict=True):
            expect(0 <= head[0] < len(row_slots), "edits are of no row")
            kept = self._kept[int(row_slots[head[0]])]
            mask = None if head[MASK_ROWS] == NONE else next(masks)
            edits.append(_applied(kept, head, parts, factors, mask))
        return tuple(edits)


def _parts_of(changes: EditChanges) -> Iterator[Arrays]:
    """The arrays of every edit, field by field as in `_Parts`."""
    heads = changes.heads
    num_biases = np.maximum(heads[:, 2], 0)
    num_new = np.where(heads[:, 3] == NONE, 0, heads[:, 3] - heads[:, 4])
    lengths = {
        "bias_tokens": num_biases, "bias": num_biases,
        "count_places": heads[:, 5], "tokens": num_new, "counts": heads[:, 5] + num_new,
        "in_prompt": heads[:, 5] + num_new, "path_rows": heads[:, 6], "path_tokens": heads[:, 6],
    }  # fmt: skip
    for name, own in lengths.items():
        array = getattr(changes, name)
        expect_flat(name, array)
        ends = ends_of(own, len(array), name)
        yield [array[first:end] for first, end in zip([0, *ends], ends, strict=False)]


def _applied(
    kept: CachedEdits,
    head: list[int],
    parts: Arrays,
    factors: Iterator[list[float]],
    mask: UInt32 | None,
) -> LogitEdits:
    """One edit, which is kept from now on; `factors` of the penalties that follow."""
    first_row, num_rows, num_biases, num_tokens, num_kept, num_changed, *_ = head
    bias_tokens, bias, places, tokens, counts, in_prompt, path_rows, path_tokens = parts
    if num_biases != AS_KEPT:
        kept.bias_tokens, kept.bias = bias_tokens, bias
    penalties = None
    if num_tokens != NONE:
        expect(0 <= num_kept <= kept.num_tokens, "tokens are not known here")
        if num_changed:
            expect(places.min() >= 0 and places.max() < num_kept, "counts are of no token")
        kept.counts[places], kept.in_prompt[places] = counts[:num_changed], in_prompt[:num_changed]
        kept.put_tail(num_kept, tokens, counts[num_changed:], in_prompt[num_changed:])
        penalties = Penalties(*kept.text, path_rows, path_tokens, *next(factors))
    return LogitEdits(first_row, num_rows, kept.bias_tokens, kept.bias, penalties, mask)


class ReceivedMasks:
    """The receiver's end: masks by number."""

    __slots__ = ("_count", "_masks")

    def __init__(self) -> None:
        self._masks = np.zeros((0, 0), dtype=np.uint32)
        self._count = 0

    def apply(self, changes: MaskChanges, counts: Int32) -> list[UInt32]:
        """The masks that the other end's `changes` was given, by their numbers of rows.

        Raises `ProtocolError` for what the other end cannot have made.
        """
        ids, first, new_masks = changes.ids, changes.first, changes.new_masks
        expect_flat("masks", ids)
        is_whole = new_masks.shape == (len(new_masks), changes.num_words)
        expect(is_whole, "masks are cut short")
        if changes.num_words != self._masks.shape[1]:
            self._masks = np.zeros((0, changes.num_words), dtype=np.uint32)
            self._count = 0
        expect(0 <= first <= self._count, "masks are not known here")
        self._count = first + len(new_masks)
        self._masks = with_room(self._masks, self._count)
        self._masks[first : self._count] = new_masks
        if len(ids):
            fits = ids.min() >= 0 and ids.max() < self._count
            expect(fits, "masks are not known here")
        ends = ends_of(counts, len(ids), "masks")
        masks = self._masks.take(ids, axis=0)
        return [masks[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]
