"""The sender's end: steps as deltas against what the stages were sent before."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ....core.arrays import Bool, Int32, UInt32, UInt64
from ....core.compiled import compiled
from ....core.steps import (
    NO_HEADS,
    NO_LOG_PROBS,
    NO_PROBES,
    LogitEdits,
    Penalties,
    SamplingRows,
    StepInput,
    StepTrees,
)
from .step_delta import (
    AS_KEPT,
    CHUNK,
    MAX_ENTRIES,
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
    TreeColumns,
    are_starts,
    typed,
    with_columns,
    with_room,
)

NUM_SLOTS = 512
# Bytes of masks that are kept, if a step has no more.
MAX_MASK_BYTES = 64 << 20
# An odd constant of many bits (the golden ratio's), which spreads the words' weights.
SPREAD = 0x9E3779B97F4A7C15
FREE = -1
SAMPLING_TYPES = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p"), np.float32),
    "top_k": np.int32,
    **dict.fromkeys(("seed", "position"), np.int64),
}
NO_FACTORS = np.empty((0, 3), dtype=np.float64)

Arrays = list[NDArray[Any]]


class StepEncoder:
    """Knows what the stages of one run keep, and sends what differs.

    Stages that were replaced, or that may have missed a step, keep nothing that counts: they get a
    new encoder of another `epoch`. Nothing is taken for granted about a request either: each table
    is compared with the one that was sent, so a request that was preempted, or took over a slot,
    sends its own again.
    """

    __slots__ = ("_edits", "_epoch", "_serial", "_slots", "_tables")

    def __init__(self, epoch: int) -> None:
        """`epoch` differs from that of every run that the stages may remember."""
        self._epoch = epoch
        self._begin()

    def encode(self, step: StepInput) -> StepDelta:
        """The next message: what differs from the step before.

        Every message that is encoded must be sent, in order. Raises `TypeError` for what is no
        step; the next message holds everything then.
        """
        assert step.multi_step is None, "stages of other processes take a token a step"
        try:
            rows = self._rows(step)
            delta = StepDelta(self._epoch, self._serial, rows, self._choice(step, rows))
        except BaseException:
            self.forget()
            raise
        self._serial += 1
        return delta

    def forget(self) -> None:
        """The last message was not sent: the next one holds everything."""
        self._begin()

    def _begin(self) -> None:
        self._serial = 0
        self._slots = RequestSlots()
        self._tables = SentTables()
        self._edits = SentEdits()

    def _rows(self, step: StepInput) -> RowsDelta:
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
        return RowsDelta(
            step_id=step.step_id,
            is_traced=step.is_traced,
            moves=step.moves,
            token_ids=step.token_ids,
            positions=typed(step.positions, np.int32, 1, "positions"),
            slots=step.slots,
            request_starts=starts,
            context_lens=step.context_lens,
            request_slots=slots,
            state_slots=_checked_states(step.state_slots, num_requests),
            state_loads=typed(step.state_loads, np.int32, 2, "state loads"),
            state_saves=typed(step.state_saves, np.int32, 2, "state saves"),
            tables=self._tables.changes(slots, tables),
            trees=flatten_trees(step),
        )

    def _choice(self, step: StepInput, rows: RowsDelta) -> ChoiceDelta:
        logits_rows = typed(step.logits_rows, np.int32, 1, "logits rows")
        if len(logits_rows) and not 0 <= logits_rows.min() <= logits_rows.max() < len(rows.slots):
            raise TypeError("logits are of no row")
        return ChoiceDelta(
            logits_rows=logits_rows,
            sampling=_checked_sampling(step.sampling, len(logits_rows)),
            edits=self._edits.changes(step.edits, rows.slots_of(logits_rows)),
            verification=step.verification,
            log_probs=None if step.log_probs is NO_LOG_PROBS else step.log_probs,
            probes=None if step.probes is NO_PROBES else step.probes,
            heads=None if step.heads is NO_HEADS else step.heads,
            request_keys=step.request_keys if step.heads.tasks else (),
        )


def _checked_states(slots: Int32, num_requests: int) -> Int32:
    """Raises `TypeError` for slots of other requests."""
    if len(typed(slots, np.int32, 1, "state slots")) not in (0, num_requests):
        raise TypeError("states are of other requests")
    return slots


def _checked_sampling(sampling: SamplingRows, num_rows: int) -> SamplingRows:
    """Raises `TypeError` for arrays that no step has."""
    for name, dtype in SAMPLING_TYPES.items():
        if len(typed(getattr(sampling, name), dtype, 1, name)) != num_rows:
            raise TypeError("sampling parameters are of other rows")
    return sampling


class SentTables:
    """What the other end has of each slot's block table: int32 [slots, columns], zeros at first."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept = np.zeros((0, 0), dtype=np.int32)

    def changes(self, slots: Int32, tables: Int32) -> TableChanges:
        """What differs in the block tables int32 [requests, width]; kept from now on.

        Raises `TypeError` for tables that no message holds.
        """
        width = tables.shape[1]
        if len(slots) != len(tables) or tables.size > MAX_ENTRIES:
            raise TypeError(f"block tables {tables.shape} of {len(slots)} requests")
        self._kept = with_columns(self._kept, slots, width)
        return TableChanges(width, *_table_changes(self._kept, slots, tables))


@compiled
def _table_changes(kept: Int32, slots: Int32, tables: Int32) -> tuple[Int32, Int32]:
    """First column and number of columns that differ, of each request, and these columns."""
    num_requests, width = tables.shape
    spans = np.zeros((2, num_requests), dtype=np.int32)
    firsts, counts = spans
    for place in range(num_requests):
        old, new = kept[slots[place]], tables[place]
        end = width
        while end > 0 and old[end - 1] == new[end - 1]:
            end -= 1
        if end:
            firsts[place] = num_equal(new, old, 0)
            counts[place] = end - firsts[place]
    blocks = np.empty(counts.sum(), dtype=np.int32)
    done = 0
    for place in range(num_requests):
        for column in range(firsts[place], firsts[place] + counts[place]):
            blocks[done] = kept[slots[place], column] = tables[place, column]
            done += 1
    return spans, blocks


@compiled
def num_equal(left: NDArray[Any], right: NDArray[Any], first: int) -> int:
    """The first place from `first` on where they differ, or the length of `left`."""
    while first + CHUNK <= len(left):
        # Slices, whose places count from 0: no loop over places that may be below 0 is vectorised.
        old, new, count = left[first : first + CHUNK], right[first : first + CHUNK], 0
        for index in range(CHUNK):
            count += old[index] != new[index]
        if count:
            break
        first += CHUNK
    while first < len(left) and left[first] == right[first]:
        first += 1
    return first


class RequestSlots:
    """Gives each request a slot, and keeps it there for as long as others do not need the room.

    What a slot holds is never taken for granted, so a request that ended need not be reported: the
    slot that was used least recently goes to the next newcomer.
    """

    __slots__ = ("_most", "_slots")

    def __init__(self, most: int = NUM_SLOTS) -> None:
        """`most` slots, or as many as one step has requests."""
        self._most = most
        self._slots: OrderedDict[int, int] = OrderedDict()

    def place(self, keys: Sequence[int]) -> Int32:
        """The slot of each request of a step, int32 [requests]; no two share one.

        `keys` name requests from step to step; where two are equal, none of them counts.
        """
        if len(set(keys)) < len(keys):
            keys = range(-1, -1 - len(keys), -1)
        slots, known = self._slots, [key for key in keys if key in self._slots]
        for key in known:
            slots.move_to_end(key)
        self._most = max(self._most, len(keys))
        if len(known) < len(keys):
            for key in keys:
                if key not in slots:
                    free = len(slots) < self._most
                    slots[key] = len(slots) if free else slots.popitem(last=False)[1]
        return np.fromiter(map(slots.__getitem__, keys), dtype=np.int32, count=len(keys))


def flatten_trees(step: StepInput) -> TreeArrays | None:
    """The trees of a step, one behind the other; None without any.

    Raises `TypeError` for arrays that no tree has.
    """
    if isinstance(step.trees, StepTrees):
        return _own_columns(step.trees)
    trees = [tree for tree in step.trees if tree is not None]
    if not trees:
        return None
    bits = [typed(tree.ancestors, np.uint64, 2, "ancestors") for tree in trees]
    slots = np.concatenate([typed(tree.slots, np.int32, 1, "slots") for tree in trees])
    positions = np.concatenate([typed(tree.positions, np.int32, 1, "positions") for tree in trees])
    sizes = [(len(tree.slots), len(tree.positions)) for tree in trees]
    if any(num_slots != num_positions for num_slots, num_positions in sizes):
        raise TypeError("a tree has columns without a slot or a position")
    num_columns = np.array([count for count, _ in sizes], dtype=np.int32)
    own = iter([tree.shape for tree in bits])
    shapes = [NO_TREE if tree is None else next(own) for tree in step.trees]
    are_rows = _are_rows(step, num_columns, slots, positions)
    return TreeArrays(
        np.array(shapes, dtype=np.int32),
        np.concatenate([tree.ravel() for tree in bits]),
        None if are_rows else TreeColumns(num_columns, slots, positions),
    )


def _own_columns(trees: StepTrees) -> TreeArrays | None:
    """Trees that are arrays already."""
    if not trees.num_trees:
        return None
    shapes = np.full((len(trees), 2), NO_TREE, dtype=np.int32)
    shapes[: trees.num_trees] = trees.shapes
    return TreeArrays(shapes, trees.ancestors, None)


def _are_rows(step: StepInput, num_columns: Int32, slots: Int32, positions: Int32) -> bool:
    """Whether the columns of all trees are their requests' rows, the first ones of the step."""
    starts = step.request_starts[: len(num_columns) + 1]
    is_first = all(tree is not None for tree in step.trees[: len(num_columns)])
    if not is_first or not np.array_equal(np.diff(starts), num_columns):
        return False
    own = slice(int(starts[0]), int(starts[-1]))
    return np.array_equal(step.slots[own], slots) and np.array_equal(step.positions[own], positions)


@dataclass(slots=True, eq=False)
class _Parts:
    """The arrays of `EditChanges`, edit by edit."""

    heads: list[tuple[int, ...]] = field(default_factory=list)
    bias_tokens: Arrays = field(default_factory=list)
    bias: Arrays = field(default_factory=list)
    factors: Arrays = field(default_factory=list)
    count_places: Arrays = field(default_factory=list)
    tokens: Arrays = field(default_factory=list)
    counts: Arrays = field(default_factory=list)
    in_prompt: Arrays = field(default_factory=list)
    path_rows: Arrays = field(default_factory=list)
    path_tokens: Arrays = field(default_factory=list)


class SentEdits:
    """The sender's end: what the other end knows of each slot."""

    __slots__ = ("_kept", "_masks")

    def __init__(self) -> None:
        self._kept: defaultdict[int, CachedEdits] = defaultdict(CachedEdits)
        self._masks = SentMasks()

    def changes(self, edits: Sequence[LogitEdits], row_slots: Int32) -> EditChanges | None:
        """The edits of a step against what is kept; None without any.

        `row_slots` int32 [logits rows]  the slot of the request that each belongs to. Raises
        `TypeError` for edits that no step has.
        """
        if not edits:
            return None
        parts = _Parts()
        for edit in edits:
            if not 0 <= edit.first_row < len(row_slots):
                raise TypeError("edits are of no row")
            self._add(parts, edit, self._kept[int(row_slots[edit.first_row])])
        masks = self._masks.changes([edit.mask for edit in edits if edit.mask is not None])
        return EditChanges(
            np.array(parts.heads, dtype=np.int32),
            _joined(parts.bias_tokens, np.int32), _joined(parts.bias, np.float32),
            np.concatenate(parts.factors or [NO_FACTORS]), _joined(parts.count_places, np.int32),
            _joined(parts.tokens, np.int32), _joined(parts.counts, np.int32),
            _joined(parts.in_prompt, np.bool_), _joined(parts.path_rows, np.int32),
            _joined(parts.path_tokens, np.int32), masks,
        )  # fmt: skip

    def _add(self, parts: _Parts, edit: LogitEdits, kept: CachedEdits) -> None:
        num_biases = AS_KEPT
        if not _same(kept.bias_tokens, edit.bias_tokens) or not _same(kept.bias, edit.bias):
            kept.bias_tokens = typed(edit.bias_tokens, np.int32, 1, "bias tokens")
            kept.bias = typed(edit.bias, np.float32, 1, "bias")
            num_biases = len(kept.bias)
            parts.bias_tokens.append(kept.bias_tokens)
            parts.bias.append(kept.bias)
            if len(kept.bias_tokens) != num_biases:
                raise TypeError("tokens have no bias")
        penalties, num_masks = edit.penalties, NONE if edit.mask is None else len(edit.mask)
        head = (NONE, 0, 0, 0) if penalties is None else self._penalties(parts, penalties, kept)
        parts.heads.append((edit.first_row, edit.num_rows, num_biases, *head, num_masks))

    @staticmethod
    def _penalties(
        parts: _Parts, penalties: Penalties, kept: CachedEdits
    ) -> tuple[int, int, int, int]:
        num_kept, places = _num_kept(kept, penalties)
        factors = penalties.repetition, penalties.presence, penalties.frequency
        parts.factors.append(np.array([factors], dtype=np.float64))
        tail = slice(num_kept, None)
        counts, in_prompt = penalties.counts, penalties.in_prompt
        parts.tokens.append(penalties.tokens[tail])
        parts.count_places.append(places)
        parts.counts += (counts[places], counts[tail])
        parts.in_prompt += (in_prompt[places], in_prompt[tail])
        kept.counts[places], kept.in_prompt[places] = counts[places], in_prompt[places]
        kept.put_tail(num_kept, penalties.tokens[tail], counts[tail], in_prompt[tail])
        parts.path_rows.append(typed(penalties.path_rows, np.int32, 1, "path rows"))
        parts.path_tokens.append(typed(penalties.path_tokens, np.int32, 1, "path tokens"))
        if len(penalties.path_rows) != len(penalties.path_tokens):
            raise TypeError("a path has rows without a token")
        return len(penalties.tokens), num_kept, len(places), len(penalties.path_rows)


def _num_kept(kept: CachedEdits, penalties: Penalties) -> tuple[int, Int32]:
    """How many tokens, from the first on, are those kept; whose counts of them are others."""
    tokens = typed(penalties.tokens, np.int32, 1, "tokens")
    counts = typed(penalties.counts, np.int32, 1, "counts")
    in_prompt = typed(penalties.in_prompt, np.bool_, 1, "in_prompt")
    if not len(tokens) == len(counts) == len(in_prompt):
        raise TypeError("penalties have tokens without a count")
    return _compared(*kept.text, tokens, counts, in_prompt)


@compiled
def _compared(
    kept_tokens: Int32,
    kept_counts: Int32,
    kept_in_prompt: Bool,
    tokens: Int32,
    counts: Int32,
    in_prompt: Bool,
) -> tuple[int, Int32]:
    most = min(len(kept_tokens), len(tokens))
    num_kept = num_equal(kept_tokens[:most], tokens[:most], 0)
    places = np.empty(num_kept, dtype=np.int32)
    done = index = 0
    while index < num_kept:
        index = min(
            num_equal(kept_counts[:num_kept], counts[:num_kept], index),
            num_equal(kept_in_prompt[:num_kept], in_prompt[:num_kept], index),
        )
        if index < num_kept:
            places[done] = index
            done += 1
            index += 1
    return num_kept, places[:done].copy()


def _same(left: NDArray[Any], right: NDArray[Any]) -> bool:
    """Whether they are equal bit by bit."""
    return left is right or (left.dtype == right.dtype and left.tobytes() == right.tobytes())


def _joined(parts: Arrays, dtype: DTypeLike) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


class SentMasks:
    """The sender's end: the masks that the other end has, by number.

    What has no room any more begins anew: the other end is sent again what it needs.
    """

    __slots__ = ("_count", "_hashes", "_masks", "_table", "_weights")

    def __init__(self) -> None:
        self._start(0)

    def changes(self, masks: Sequence[UInt32]) -> MaskChanges | None:
        """The numbers of the rows of all masks uint32 [rows, words], and the masks that are new.

        None without any row. Raises `TypeError` for masks of several vocabularies.
        """
        if not masks:
            return None
        masks = [typed(mask, np.uint32, 2, "mask") for mask in masks]
        num_words, num_rows = masks[0].shape[1], sum(map(len, masks))
        if any(mask.shape[1] != num_words for mask in masks):
            raise TypeError("masks are of several vocabularies")
        most = max(MAX_MASK_BYTES // max(1, 4 * num_words), num_rows)
        if num_words != self._masks.shape[1] or self._count + num_rows > most:
            self._start(num_words)
        first = self._count
        self._make_room(first + num_rows)
        ids, self._count = _number_all(
            np.concatenate(masks), self._weights, self._masks, self._hashes, self._table, first
        )
        return MaskChanges(num_words, ids, first, self._masks[first : self._count])

    def _start(self, num_words: int) -> None:
        weights = np.arange(1, num_words + 1, dtype=np.uint64) * np.uint64(SPREAD)
        # Odd, so that no bit of a word is without weight.
        self._weights = (weights >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
        self._masks = np.zeros((0, num_words), dtype=np.uint32)
        self._hashes = np.zeros(0, dtype=np.uint64)
        self._table = np.full(1, FREE, dtype=np.int32)
        self._count = 0

    def _make_room(self, count: int) -> None:
        if count <= len(self._masks):
            return
        self._masks = with_room(self._masks, count)
        self._hashes = np.resize(self._hashes, len(self._masks))
        # Four places a mask, so that searches end soon.
        self._table = np.full(1 << (4 * len(self._masks)).bit_length(), FREE, dtype=np.int32)
        _enter(self._table, self._hashes[: self._count])


@compiled
def _enter(table: Int32, hashes: UInt64) -> None:
    """Enter masks by their hashes: each at its place in the table, or the next that is free."""
    for number in range(len(hashes)):
        place = hashes[number] & np.uint64(len(table) - 1)
        while table[place] != FREE:
            place = (place + np.uint64(1)) & np.uint64(len(table) - 1)
        table[place] = number


@compiled
def _number_all(
    masks: UInt32, weights: UInt32, kept: UInt32, hashes: UInt64, table: Int32, count: int
) -> tuple[Int32, int]:
    """The number of each mask, and how many are kept then: those that are new follow the others.

    A hash of 64 bits sums words by weights (multilinear hashing), so equal hashes are only a hint.
    """
    ids = np.empty(len(masks), dtype=np.int32)
    for row in range(len(masks)):
        words, total = masks[row], np.uint64(0)
        for index in range(len(words)):
            total += np.uint64(words[index]) * np.uint64(weights[index])
        place = total & np.uint64(len(table) - 1)
        while table[place] != FREE:
            number = table[place]
            if hashes[number] == total and _are_equal(kept[number], words):
                break
            place = (place + np.uint64(1)) & np.uint64(len(table) - 1)
        if table[place] == FREE:
            table[place], hashes[count] = count, total
            kept[count] = words
            count += 1
        ids[row] = table[place]
    return ids, count


@compiled
def _are_equal(left: UInt32, right: UInt32) -> bool:
    bits = np.uint32(0)
    for index in range(len(right)):
        bits |= left[index] ^ right[index]
    return bits == 0
