"""Cuts a step's attention in items of about equal work, on the host, once a step.

A tile is some rows of one request with all query heads of a key/value head, so that they share
every load of a key. A tile that sees a long context is split over the context (flash-decoding):
its items leave partial results that are merged by log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.arrays import Int32, Int64
from ...core.compiled import compiled

# A tile of columns is a word of ancestor bits at most, and splits begin at whole tiles.
COLUMN_STEP = 64
# Below this a split costs more than it spreads.
LEAST_SPLIT = 256
TILE_LINES = (16, 32, 64)

# Columns of `TilePlan.items`.
ITEM_FIELDS = 7
# Columns of `RequestRows.table`.
REQUEST_FIELDS = 6


@dataclass(frozen=True, slots=True, eq=False)
class RequestRows:
    """int32 [requests, REQUEST_FIELDS]; what each request's rows see.

    0 first_row  of the step             3 first_own  of the step's own columns
    1 num_rows                           4 num_own    own columns: tree nodes, or the chunk's rows
    2 context_len                        5 is_causal  1: row i sees own columns 0..i; 0: by bits
    """

    table: Int32

    def column(self, index: int) -> Int64:
        """One of the fields listed above, int64 [requests]."""
        return self.table[:, index].astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class TilePlan:
    """items int32 [items, ITEM_FIELDS], longest first; merges int32 [rows, 3]; their partials.

    items:  0 request                    4 context_end
            1 first_row  of the step     5 num_own  own columns from the first; 0: none here
            2 num_rows                   6 partial  index of its partial result; -1: it is whole
            3 context_begin
    merges: of each row: first partial, number of partials (0: nothing to merge), row in its tile
    """

    items: Int32
    merges: Int32
    num_partials: int


def lines_of_tiles(share: int, most_rows: int) -> int:
    """Lines (rows times `share`) of a tile when the largest request has `most_rows` rows."""
    wanted = max(most_rows, 1) * share
    lines = next((count for count in TILE_LINES if count >= wanted), TILE_LINES[-1])
    while lines < share:
        lines *= 2
    return lines


def plan_tiles(
    requests: RequestRows, num_rows: int, tile_rows: int, *, num_programs: int, max_partials: int
) -> TilePlan:
    """Items that keep `num_programs` of them busy, with at most `max_partials` partial results."""
    table = requests.table
    split_len = _split_len(table, tile_rows, max(num_programs, 1), max_partials)
    return TilePlan(*_cut(table, num_rows, tile_rows, split_len))


@compiled
def _split_len(table: Int32, tile_rows: int, num_programs: int, max_partials: int) -> int:
    """Columns of the context that an item has at most: a multiple of `COLUMN_STEP`."""
    total = 0
    for request in table:
        for first in range(0, request[1], tile_rows):
            total += request[2] + _num_own(request, first, tile_rows)
    length = _whole_steps(max(LEAST_SPLIT, -(-total // num_programs)))
    while True:
        num_partials = 0
        for request in table:
            num_splits = _num_splits(request[2], length)
            if num_splits > 1:
                num_partials += -(-request[1] // tile_rows) * num_splits
        if num_partials <= max_partials:
            return length
        length = _whole_steps(length * 5 // 4)


@compiled
def _cut(table: Int32, num_rows: int, tile_rows: int, split_len: int) -> tuple[Int32, Int32, int]:
    """Items, merges and number of partial results, as in `TilePlan`."""
    num_items = 0
    for request in table:
        num_items += -(-request[1] // tile_rows) * _num_splits(request[2], split_len)
    items = np.empty((num_items, ITEM_FIELDS), dtype=np.int32)
    # Minus the columns that an item sees, which are what it takes.
    lengths = np.empty(num_items, dtype=np.int64)
    merges = np.zeros((num_rows, 3), dtype=np.int32)
    item, num_partials = 0, 0
    for index, request in enumerate(table):
        num_splits = _num_splits(request[2], split_len)
        for first in range(0, request[1], tile_rows):
            count = min(tile_rows, request[1] - first)
            for row in range(count):
                merge = merges[request[0] + first + row]
                merge[0], merge[2] = num_partials, row
                merge[1] = num_splits if num_splits > 1 else 0
            for split in range(num_splits):
                begin = split * split_len
                end = min(begin + split_len, request[2])
                num_own = _num_own(request, first, tile_rows) if split == num_splits - 1 else 0
                fields = items[item]
                fields[0], fields[1], fields[2] = index, request[0] + first, count
                fields[3], fields[4], fields[5] = begin, end, num_own
                fields[6] = -1
                if num_splits > 1:
                    fields[6] = num_partials
                    num_partials += 1
                lengths[item] = begin - end - num_own
                item += 1
    return items[np.argsort(lengths, kind="mergesort")], merges, num_partials


@compiled
def _num_own(request: Int32, first: int, tile_rows: int) -> int:
    """Own columns that a tile sees at most."""
    if request[5] == 1:
        return min(first + tile_rows, request[1])
    return request[4]


@compiled
def _num_splits(context: int, split_len: int) -> int:
    return max(-(-context // split_len), 1)


@compiled
def _whole_steps(length: int) -> int:
    return -(-length // COLUMN_STEP) * COLUMN_STEP
