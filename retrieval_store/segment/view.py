"""A segment's arrays as compiled code sees them: numbers that fit in one row of an array.

A lookup reads any number of segments in one call. Compiled code is specialised by the types and
number of its arrays, so each segment is passed as the addresses and sizes of its arrays. The owner
of the rows must keep the segments alive.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.arrays import Int64
from ...core.compiled import address_of, carray, compiled, pointer
from .segment import Segment
from .wide_nodes import LOW, SHARED

# Columns of a row.
(
    TEXT, SUFFIXES, COMMON_LENS, FIRST_PLACES, SIZE, VOCAB_SIZE,
    WIDE_NODES, WIDE_CHILDREN, NUM_WIDE,
) = range(9)  # fmt: skip


def segment_rows(segments: Sequence[Segment]) -> Int64:
    """int64 [segments, 9]: addresses of the arrays, and the sizes that the columns name."""
    rows = [
        (
            address_of(segment.text),
            address_of(segment.suffixes),
            address_of(segment.common_lens),
            address_of(segment.first_places),
            len(segment.suffixes),
            segment.header.vocab_size,
            address_of(segment.wide_nodes),
            address_of(segment.wide_children),
            len(segment.wide_nodes) - 1,
        )
        for segment in segments
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 9)


@compiled
def token(rows: Int64, index: int, place: int, depth: int) -> int:
    """The token at `depth` of the suffix at `place`."""
    size = rows[index, SIZE]
    suffixes = carray(pointer(rows[index, SUFFIXES]), size, np.uint32)
    text = carray(pointer(rows[index, TEXT]), size, np.uint32)
    raw = text[np.int64(suffixes[place]) + depth]
    # Texts are big-endian.
    high = ((raw & 0xFF) << 24) | ((raw & 0xFF00) << 8)
    return int(high | ((raw >> 8) & 0xFF00) | (raw >> 24))


@compiled
def common_len(rows: Int64, index: int, place: int) -> int:
    """Tokens that the suffix at `place` shares with the one before it."""
    return int(carray(pointer(rows[index, COMMON_LENS]), rows[index, SIZE], np.uint8)[place])


@compiled
def bucket(rows: Int64, index: int, first_token: int) -> tuple[int, int]:
    """The span of the suffixes that begin with a token."""
    if not 0 <= first_token < rows[index, VOCAB_SIZE]:
        return 0, 0
    places = carray(pointer(rows[index, FIRST_PLACES]), rows[index, VOCAB_SIZE] + 1, np.uint32)
    return int(places[first_token]), int(places[first_token + 1])


@compiled
def wide_node(rows: Int64, index: int, node: int, column: int) -> int:
    """One column of a row of the table of wide nodes; see `wide_nodes.py`."""
    numbers = carray(pointer(rows[index, WIDE_NODES]), 4 * (node + 1), np.uint32)
    return int(numbers[4 * node + column])


@compiled
def wide_child(rows: Int64, index: int, child: int, column: int) -> int:
    """One column of a row of the table of wide nodes' children."""
    numbers = carray(pointer(rows[index, WIDE_CHILDREN]), 4 * (child + 1), np.uint32)
    return int(numbers[4 * child + column])


@compiled
def find_wide(rows: Int64, index: int, low: int, length: int) -> int:
    """The wide node of the span that begins at `low` and shares `length` tokens, which is there."""
    # Of the nodes that begin at one place, the narrower ones come first and share more tokens.
    first, end = 0, rows[index, NUM_WIDE]
    while end - first > 1:
        middle = (first + end) // 2
        node_low = wide_node(rows, index, middle, LOW)
        if node_low < low or (node_low == low and wide_node(rows, index, middle, SHARED) >= length):
            first = middle
        else:
            end = middle
    return int(first)
