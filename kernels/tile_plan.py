"""Cuts a step's attention in items of about equal work, on the host, once a step.

A tile is some rows of one request with all query heads of a key/value head, so that they share
every load of a key. A tile that sees a long context is split over the context (flash-decoding):
its items leave partial results that are merged by log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.types import Int32, Int64

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
        """One of the fields above, int64 [requests]."""
        return self.table[:, index].astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class TilePlan:
    """items int32 [items, ITEM_FIELDS], longest first; merges int32 [rows, 3].

    items:  0 request                    4 context_end
            1 first_row  of the step     5 num_own  own columns from the first; 0: none here
            2 num_rows                   6 partial  index of its partial result; -1: it is whole
            3 context_begin
    merges: of each row: first partial, number of partials (0: nothing to merge), row in its tile
    """

    items: Int32
    merges: Int32


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
    tiles = _tiles(requests, tile_rows)
    split_len = _split_len(tiles, num_programs, max_partials)
    num_splits = _num_splits(tiles.context, split_len)
    is_split = num_splits > 1
    first_partial = np.cumsum(num_splits * is_split) - num_splits * is_split
    tile, split = _enumerate(num_splits)
    begin = split * split_len
    end = np.minimum(begin + split_len, tiles.context[tile])
    own = np.where(split == num_splits[tile] - 1, tiles.own[tile], 0)
    partial = np.where(is_split[tile], first_partial[tile] + split, -1)
    items = np.stack(
        (tiles.request[tile], tiles.first_row[tile], tiles.num_rows[tile], begin, end, own, partial)
    )
    longest_first = np.argsort(begin - end - own, kind="stable")
    merges = np.zeros((num_rows, 3), dtype=np.int32)
    rows, in_tile = _enumerate(tiles.num_rows)
    merges[tiles.first_row[rows] + in_tile] = np.stack(
        (first_partial[rows], (num_splits * is_split)[rows], in_tile), axis=1
    )
    return TilePlan(np.ascontiguousarray(items.T[longest_first], dtype=np.int32), merges)


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """All int64 [tiles]; `own` is how many own columns the tile sees at most."""

    request: Int64
    first_row: Int64
    num_rows: Int64
    context: Int64
    own: Int64


def _tiles(requests: RequestRows, tile_rows: int) -> _Tiles:
    first_row, num_rows, context, _, num_own, is_causal = map(requests.column, range(6))
    request, index = _enumerate(-(-num_rows // tile_rows))
    offset = index * tile_rows
    rows = np.minimum(tile_rows, num_rows[request] - offset)
    own = np.where(is_causal[request] == 1, offset + rows, num_own[request])
    return _Tiles(request, first_row[request] + offset, rows, context[request], own)


def _split_len(tiles: _Tiles, num_programs: int, max_partials: int) -> int:
    total = int((tiles.context + tiles.own).sum())
    length = _whole_steps(max(LEAST_SPLIT, -(-total // max(num_programs, 1))))
    while True:
        num_splits = _num_splits(tiles.context, length)
        if num_splits[num_splits > 1].sum() <= max_partials:
            return length
        length = _whole_steps(length * 5 // 4)


def _num_splits(context: Int64, split_len: int) -> Int64:
    return np.maximum(-(-context // split_len), 1)


def _whole_steps(length: int) -> int:
    return -(-length // COLUMN_STEP) * COLUMN_STEP


def _enumerate(counts: Int64) -> tuple[Int64, Int64]:
    """Owner and index below the owner of each of `counts[owner]` things."""
    owner = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    return owner, np.arange(len(owner), dtype=np.int64) - first[owner]
