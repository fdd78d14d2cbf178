"""What both ends of a message keep of each request, by its slot, and change alike.

Either `changes` or `apply` is called on an end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....core.arrays import Bool, Float32, Float64, Int32, Int64, UInt32
from ....core.compiled import compiled
from ....core.steps import Penalties, SamplingRows
from .step_delta import (
    RowsDelta,
    SamplingChanges,
    TableChanges,
    expect,
    expect_flat,
    typed,
)

# Entries of the largest table that is kept: half a gigabyte.
MAX_ENTRIES = 1 << 27
# Entries that are compared at once.
CHUNK = 64
NO_INTS = np.empty(0, dtype=np.int32)
NO_FLOATS = np.empty(0, dtype=np.float32)
# In the order of `SamplingChanges.floats`.
FLOATS = ("temperature", "top_p", "min_p", "typical_p")
NO_SEEDS = np.empty(0, dtype=np.int64)
# Tokens and token masks that there is room for at first.
FIRST_ROOM = 256
FIRST_MASKS = 64


class CachedTables:
    """int32 [slots, columns], zeros at first. Either `changes` or `apply` is called on an end."""

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
        self._make_room(slots, width)
        return TableChanges(width, *_table_changes(self._kept, slots, tables))

    def apply(self, slots: Int32, changes: TableChanges) -> Int32:
        """The block tables that the other end's `changes` was given.

        Raises `ProtocolError` for what it cannot have made.
        """
        spans, blocks, width = changes.spans, changes.blocks, changes.width
        expect_flat("block tables", blocks)
        expect(spans.shape == (2, len(slots)), "block tables are of other requests")
        highest = max(_most(slots) + 1, len(self._kept), 1)
        expect(0 <= width <= MAX_ENTRIES // highest, f"block tables of {width} columns")
        are_whole = _are_spans(spans, width, len(blocks))
        expect(are_whole, "block tables are cut short, too many, or longer than wide")
        self._make_room(slots, width)
        return _with_changes(self._kept, slots, spans, blocks, width)

    def _make_room(self, slots: Int32, width: int) -> None:
        num_slots, num_columns = self._kept.shape
        needed = _most(slots) + 1
        if needed <= num_slots and width <= num_columns:
            return
        # By a quarter more, since contexts grow block by block.
        if width > num_columns:
            num_columns = width + width // 4 + CHUNK
        grown = np.zeros((max(needed, num_slots), num_columns), dtype=np.int32)
        grown[: self._kept.shape[0], : self._kept.shape[1]] = self._kept
        self._kept = grown


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


def _most(slots: Int32) -> int:
    """The highest slot; -1 without any. Of few numbers Python's own is the quicker one."""
    return max(slots.tolist(), default=-1)


class CachedSampling:
    """Parameters of the request in each slot, zeros at first.

    Either `changes` or `apply` is called on an end.
    """

    __slots__ = ("_floats", "_seeds", "_top_k")

    def __init__(self) -> None:
        self._floats = np.zeros((0, 4), dtype=np.float32)
        self._top_k = np.zeros(0, dtype=np.int32)
        self._seeds = np.zeros(0, dtype=np.int64)

    def changes(
        self, rows: RowsDelta, logits_rows: Int32, sampling: SamplingRows
    ) -> SamplingChanges | None:
        """What differs in the parameters of these rows; kept from now on. None: nothing.

        Raises `TypeError` for arrays that no step has.
        """
        floats, top_k, seeds, positions = _columns(sampling, len(logits_rows))
        starts, slots = rows.request_starts, rows.request_slots
        is_regular, is_behind = _regular(
            starts, logits_rows, rows.positions, floats.view(np.int32), top_k, seeds, positions
        )
        if not is_regular:
            return SamplingChanges(NO_INTS, NO_FLOATS, NO_INTS, NO_SEEDS, None, sampling)
        self._make_room(slots)
        kept = self._floats.view(np.int32), self._top_k, self._seeds
        places = _sampling_changes(
            starts, slots, logits_rows, floats.view(np.int32), top_k, seeds, *kept
        )
        if is_behind and not len(places):
            return None
        changed = slots[places]
        return SamplingChanges(
            places,
            self._floats[changed].ravel(),
            self._top_k[changed],
            self._seeds[changed],
            None if is_behind else positions,
            None,
        )

    def apply(
        self, rows: RowsDelta, logits_rows: Int32, changes: SamplingChanges | None
    ) -> SamplingRows:
        """The parameters that the other end's `changes` was given.

        `rows` and `logits_rows` were checked to be of one step. Raises `ProtocolError` for what
        the other end cannot have made.
        """
        slots, positions = rows.request_slots, None
        self._make_room(slots)
        if changes is not None:
            if changes.rows is not None:
                return changes.rows
            self._keep(slots, changes)
            positions = changes.positions
        owners = rows.slots_of(logits_rows)
        temperature, top_p, min_p, typical_p = np.ascontiguousarray(self._floats[owners].T)
        if positions is None:
            positions = rows.positions[logits_rows].astype(np.int64) + 1
        expect(positions.shape == logits_rows.shape, "positions are of other rows")
        return SamplingRows(
            temperature, self._top_k[owners], top_p, min_p, typical_p,
            self._seeds[owners], positions,
        )  # fmt: skip

    def _keep(self, slots: Int32, changes: SamplingChanges) -> None:
        places, count = changes.places, len(changes.places)
        expect_flat("sampling", places, changes.floats, changes.top_k, changes.seeds)
        is_whole = len(changes.floats) == 4 * count
        is_whole &= len(changes.top_k) == len(changes.seeds) == count
        expect(is_whole, "sampling parameters are cut short")
        if count:
            fits = places.min() >= 0 and places.max() < len(slots)
            expect(fits, "sampling parameters are of no request")
        changed = slots[places]
        self._floats[changed] = changes.floats.reshape(-1, 4)
        self._top_k[changed], self._seeds[changed] = changes.top_k, changes.seeds

    def _make_room(self, slots: Int32) -> None:
        missing = max(slots.tolist(), default=-1) + 1 - len(self._seeds)
        if missing > 0:
            self._floats = np.concatenate((self._floats, np.zeros((missing, 4), np.float32)))
            self._top_k = np.concatenate((self._top_k, np.zeros(missing, np.int32)))
            self._seeds = np.concatenate((self._seeds, np.zeros(missing, np.int64)))


def _columns(sampling: SamplingRows, count: int) -> tuple[Float32, Int32, Int64, Int64]:
    """float32 [rows, 4] as `SamplingChanges.floats`, top_k, seeds and positions."""
    columns = [typed(getattr(sampling, name), np.float32, 1, name) for name in FLOATS]
    top_k = typed(sampling.top_k, np.int32, 1, "top_k")
    seeds = typed(sampling.seed, np.int64, 1, "seed")
    positions = typed(sampling.position, np.int64, 1, "position")
    if any(len(column) != count for column in (*columns, top_k, seeds, positions)):
        raise TypeError("sampling parameters are of other rows")
    floats = np.empty((count, 4), dtype=np.float32)
    for index, column in enumerate(columns):
        floats[:, index] = column
    return floats, top_k, seeds, positions


@compiled
def _regular(
    starts: Int32,
    logits_rows: Int32,
    row_positions: Int32,
    floats: Int32,
    top_k: Int32,
    seeds: Int64,
    positions: Int64,
) -> tuple[bool, bool]:
    """Whether rows go from request to request, all of one alike; whether all positions follow."""
    request, first, is_behind = -1, 0, True
    for index in range(len(logits_rows)):
        row = logits_rows[index]
        if request < 0 or row >= starts[request + 1]:
            request, first = max(request, 0), index
            while row >= starts[request + 1]:
                request += 1
        if row < starts[request]:
            return False, False
        for column in range(4):
            if floats[index, column] != floats[first, column]:
                return False, False
        if top_k[index] != top_k[first] or seeds[index] != seeds[first]:
            return False, False
        is_behind &= positions[index] == np.int64(row_positions[row]) + 1
    return True, is_behind


@compiled
def _sampling_changes(  # noqa: PLR0917 - flat arrays, and one loop over them
    starts: Int32,
    slots: Int32,
    logits_rows: Int32,
    floats: Int32,
    top_k: Int32,
    seeds: Int64,
    kept_floats: Int32,
    kept_top_k: Int32,
    kept_seeds: Int64,
) -> Int32:
    """Keep every request's parameters; the places of those that were others. Rows are regular."""
    places = np.empty(len(slots), dtype=np.int32)
    count, request = 0, -1
    for index in range(len(logits_rows)):
        row = logits_rows[index]
        if request >= 0 and row < starts[request + 1]:
            continue
        request = max(request, 0)
        while row >= starts[request + 1]:
            request += 1
        slot = slots[request]
        is_new = kept_top_k[slot] != top_k[index] or kept_seeds[slot] != seeds[index]
        for column in range(4):
            is_new |= kept_floats[slot, column] != floats[index, column]
            kept_floats[slot, column] = floats[index, column]
        kept_top_k[slot], kept_seeds[slot] = top_k[index], seeds[index]
        if is_new:
            places[count] = request
            count += 1
    return places[:count].copy()


class CachedEdits:
    """What one end knows of the biases and the penalties of the request in one slot.

    num_tokens  so many of `tokens`, `counts` and `in_prompt` are in use
    """

    __slots__ = ("bias", "bias_tokens", "counts", "factors", "in_prompt", "num_tokens", "tokens")

    def __init__(self) -> None:
        self.bias_tokens, self.bias = NO_INTS, NO_FLOATS
        self.factors: Float64 = np.zeros(3)
        self.num_tokens = 0
        self.tokens = np.zeros(FIRST_ROOM, dtype=np.int32)
        self.counts = np.zeros(FIRST_ROOM, dtype=np.int32)
        self.in_prompt = np.zeros(FIRST_ROOM, dtype=np.bool_)

    def put_tail(self, first: int, tokens: Int32, counts: Int32, in_prompt: Bool) -> None:
        """Put these behind the first ones, which stay."""
        end = first + len(tokens)
        if end > len(self.tokens):
            room = 2 * end
            self.tokens, self.counts = np.resize(self.tokens, room), np.resize(self.counts, room)
            self.in_prompt = np.resize(self.in_prompt, room)
        self.tokens[first:end] = tokens
        self.counts[first:end] = counts
        self.in_prompt[first:end] = in_prompt
        self.num_tokens = end

    @property
    def text(self) -> tuple[Int32, Int32, Bool]:
        """What is in use of `tokens`, `counts` and `in_prompt`."""
        count = self.num_tokens
        return self.tokens[:count], self.counts[:count], self.in_prompt[:count]

    def num_kept(self, penalties: Penalties) -> tuple[int, Int32]:
        """How many tokens, from the first on, are those kept; whose counts of them are others."""
        tokens = typed(penalties.tokens, np.int32, 1, "tokens")
        counts = typed(penalties.counts, np.int32, 1, "counts")
        in_prompt = typed(penalties.in_prompt, np.bool_, 1, "in_prompt")
        if not len(tokens) == len(counts) == len(in_prompt):
            raise TypeError("penalties have tokens without a count")
        return _compared(*self.text, tokens, counts, in_prompt)


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


def with_room(masks: UInt32, count: int) -> UInt32:
    """Token masks, with rows of zeros up to `count` of them, or more."""
    if count <= len(masks):
        return masks
    grown = np.zeros((max(count, 2 * len(masks), FIRST_MASKS), masks.shape[1]), dtype=np.uint32)
    grown[: len(masks)] = masks
    return grown
