"""Block tables by request slot, on both ends of a message."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....core.arrays import Int32
from ....core.compiled import compiled
from .step_difference import TableChanges
from .typed_array import MAX_ENTRIES, expect, expect_flat

# Entries that are compared at once.
CHUNK = 64


class KeptTables:
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
        return TableChanges(width, *_changes(self._kept, slots, tables))

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
        return _applied(self._kept, slots, spans, blocks, width)

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
def _changes(kept: Int32, slots: Int32, tables: Int32) -> tuple[Int32, Int32]:
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
def _applied(kept: Int32, slots: Int32, spans: Int32, blocks: Int32, width: int) -> Int32:
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
