"""Cuts a step's attention into items, on the host, once a step.

A tile is some rows of one request with all query heads of a key/value head, which share every load
of a key. A tile with a long context is split over the context (flash-decoding): its items store
partial results, and the last item merges them by log-sum-exp. Where it is split depends on its
request alone (`split_rule.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.arrays import Int32, Int64
from ...core.compiled import compiled
from .split_rule import COLUMN_STEP, SplitRule, split_len

# Columns of `TilePlan.items`.
ITEM_FIELDS = 9
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
    """items int32 [items, ITEM_FIELDS], longest first.

    0 request                    5 num_own  own columns from the first; 0: none here
    1 first_row  of the step     6 partial  first line of its results
    2 num_rows                   7 first_partial  that of the first of the tile's splits
    3 context_begin              8 num_splits  of the tile; 1: it is whole, without partial results
    4 context_end

    A row has `share` lines of partial results, one behind the other; those of a request's rows
    follow one another, split by split. `num_lines` are all lines.
    """

    items: Int32
    num_lines: int


def plan_tiles(requests: RequestRows, tile_rows: int, rule: SplitRule) -> TilePlan:
    """The items of a step, with tiles of `tile_rows` rows."""
    lengths = _split_lens(
        requests.table, rule.share, rule.split_lines, rule.tile_lines, rule.programs
    )
    return TilePlan(*_cut(requests.table, tile_rows, rule.share, lengths))


@compiled
def _split_lens(
    table: Int32, share: int, split_lines: int, tile_lines: int, programs: int
) -> Int64:
    """`split_len` of each request."""
    lengths = np.empty(len(table), dtype=np.int64)
    for index, request in enumerate(table):
        lengths[index] = split_len(
            request[2], request[1] * share, split_lines, tile_lines, programs
        )
    return lengths


@compiled
def _cut(table: Int32, tile_rows: int, share: int, lengths: Int64) -> tuple[Int32, int]:
    """Items and number of lines, as in `TilePlan`."""
    num_items = 0
    for index, request in enumerate(table):
        num_items += -(-request[1] // tile_rows) * _num_splits(request[2], lengths[index])
    items = np.empty((num_items, ITEM_FIELDS), dtype=np.int32)
    item, num_lines = 0, 0
    for index, request in enumerate(table):
        num_splits = _num_splits(request[2], lengths[index])
        lines_of_split = request[1] * share
        for first in range(0, request[1], tile_rows):
            for split in range(num_splits):
                fields = items[item]
                fields[0], fields[1] = index, request[0] + first
                fields[2] = min(tile_rows, request[1] - first)
                fields[3] = split * lengths[index]
                fields[4] = min(fields[3] + lengths[index], request[2])
                is_last = split == num_splits - 1
                fields[5] = _num_own(request, first, tile_rows) if is_last else 0
                fields[7] = num_lines + first * share
                fields[6] = fields[7] + split * lines_of_split
                fields[8] = num_splits
                item += 1
        if num_splits > 1:
            num_lines += num_splits * lines_of_split
    return items[_longest_first(items[:, 4] - items[:, 3] + items[:, 5])], num_lines


@compiled
def _longest_first(widths: Int32) -> Int64:
    """The order of items by the columns that they see, a measure of their time.

    A counting sort by whole tiles of columns, of which there are few.
    """
    steps = widths // COLUMN_STEP
    most = 0
    for step in steps:
        most = max(most, step)
    places = np.zeros(most + 2, dtype=np.int64)
    for step in steps:
        places[most - step + 1] += 1
    places = places.cumsum()
    order = np.empty(len(steps), dtype=np.int64)
    for index, step in enumerate(steps):
        order[places[most - step]] = index
        places[most - step] += 1
    return order


@compiled
def _num_own(request: Int32, first: int, tile_rows: int) -> int:
    """Own columns that a tile sees at most."""
    if request[5] == 1:
        return min(first + tile_rows, request[1])
    return request[4]


@compiled
def _num_splits(context: int, length: int) -> int:
    return max(-(-context // length), 1)
