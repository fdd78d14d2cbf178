"""How a step's attention is cut into items, on the host, once a step.

A tile is some rows of one request with all query heads of a key/value head, which share every load
of a key. A tile with a long context is split over the context (flash-decoding): its items store
partial results, and the last item merges them by log-sum-exp. Where it is split depends on its
request alone, so that the order of its sums does not depend on the batch (batch invariance). The
memory for partial results is bounded by a number of lines a request, fixed at start.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.arrays import Int32, Int64
from ...core.compiled import compiled
from .spec import AttentionShape

# A tile of columns is a word of ancestor bits at most, and splits begin at whole tiles.
COLUMN_STEP = 64
# Columns below which a split costs more than it gains in parallelism. Requests of one tile have no
# other parallelism, and little to merge.
LEAST_SPLIT, LEAST_SPLIT_OF_ONE_TILE = 256, 128
# The merging program holds the log-sums of this many splits at once.
MOST_SPLITS = 32
# Programs that a GPU of 132 multiprocessors runs at once, two on each. More items would need a
# second wave. The same on all GPUs, so that sums are, too.
PROGRAMS = 264
# Columns from which on two items of many lines on a multiprocessor end before one that is twice as
# long, as measured on an H200.
LEAST_SHARED_SPLIT = 1024
TILE_LINES = (16, 32, 64)
# By bytes of a number: with longer keys, registers hold the results of no more lines. float32 is
# also multiplied in registers.
MOST_KEY_BYTES = {2: 512, 4: 256}
LINES_OF_LONG_KEYS = 32
# Latents in float32.
MOST_BYTES_OF_LONG, LINES_OF_LONGER_KEYS = 1024, 16
# Lines of partial results of all requests together, and of one.
PARTIAL_BYTES = 512 * 2**20
LEAST_SPLIT_LINES, MOST_SPLIT_LINES = 256, 2048


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How contexts are split; the same for all steps.

    share        query heads of a key/value head: a row has as many lines
    split_lines  lines of partial results that a request has at most, over all its splits
    most_lines   lines of a tile at most, but for rows that have more
    programs     that run at once for each key/value head
    """

    share: int
    split_lines: int
    most_lines: int = TILE_LINES[-1]
    programs: int = MOST_SPLITS

    @classmethod
    def of(cls, shape: AttentionShape, max_requests: int, itemsize: int = 2) -> SplitRule:
        """The rule where steps have up to `max_requests` requests; `itemsize` of a number."""
        line_bytes = 4 * shape.num_kv_heads * shape.head_dim
        lines = PARTIAL_BYTES // (line_bytes * max(max_requests, 1))
        key_bytes, most_lines = shape.head_dim * itemsize, TILE_LINES[-1]
        if key_bytes > MOST_BYTES_OF_LONG:
            most_lines = LINES_OF_LONGER_KEYS
        elif key_bytes > MOST_KEY_BYTES[itemsize]:
            most_lines = LINES_OF_LONG_KEYS
        return cls(
            shape.share, min(max(lines, LEAST_SPLIT_LINES), MOST_SPLIT_LINES), most_lines,
            PROGRAMS // shape.num_kv_heads,
        )  # fmt: skip

    @property
    def tile_lines(self) -> int:
        """Lines of the largest tile."""
        return self.lines_of_tiles(TILE_LINES[-1])

    def lines_of_tiles(self, most_rows: int) -> int:
        """Lines (rows times `share`) of a tile when the largest request has `most_rows` rows."""
        wanted = min(max(most_rows, 1) * self.share, self.most_lines)
        lines = next(count for count in TILE_LINES if count >= wanted)
        while lines < self.share:
            lines *= 2
        return lines

    def most_items(self, num_rows: int, num_requests: int) -> int:
        """Largest number of items of a step with up to this many rows and requests, with tiles of
        any size.

        A request that is split has no more than a tile beyond `split_lines` in all its splits; one
        that is not has a tile a row at most.
        """
        tile_rows = self.lines_of_tiles(1) // self.share
        of_split = MOST_SPLITS + self.split_lines // (tile_rows * self.share)
        return min(num_rows * MOST_SPLITS, num_rows + num_requests * of_split)


@compiled
def split_len(context: int, lines: int, split_lines: int, tile_lines: int, programs: int) -> int:
    """Columns of the context that an item has at most: a multiple of `COLUMN_STEP`.

    `lines` are all of the request's; the others are those of `SplitRule`.
    """
    least, at_once = LEAST_SPLIT_OF_ONE_TILE, programs
    if lines > tile_lines:
        least, num_tiles = LEAST_SPLIT, -(-lines // tile_lines)
        shared = min(programs // num_tiles, context // LEAST_SHARED_SPLIT)
        at_once = max(programs // 2 // num_tiles, shared)
    most = min(split_lines // max(lines, 1), at_once, MOST_SPLITS)
    wanted = min(-(-context // least), most)
    columns = -(-context // max(wanted, 1))
    return max(-(-columns // COLUMN_STEP), 1) * COLUMN_STEP


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
