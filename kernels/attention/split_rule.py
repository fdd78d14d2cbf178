"""How a request's context is split: by the request alone, independent of the rest of the batch.

So the order of its sums does not depend on the batch (batch invariance). The memory for partial
results is bounded by a number of lines a request, fixed at start.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        is_long = shape.head_dim * itemsize > MOST_KEY_BYTES[itemsize]
        return cls(
            shape.share, min(max(lines, LEAST_SPLIT_LINES), MOST_SPLIT_LINES),
            LINES_OF_LONG_KEYS if is_long else TILE_LINES[-1], PROGRAMS // shape.num_kv_heads,
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
