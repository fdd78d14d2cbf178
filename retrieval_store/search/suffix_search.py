"""Finds contexts among the sorted suffixes of segments, compiled.

A node of a segment's trie is a span (low, high) of its sorted suffixes; high is exclusive. Segments
come as rows (`retrieval_store/segment/view.py`). Cache misses dominate the time, so no context is
searched twice, and only the low end of its span is found by bisection.
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Int64
from ...core.compiled import compiled
from ..segment.view import SIZE, bucket, common_len, find_wide, token, wide_node
from ..segment.wide_nodes import HIGH, WIDE

ABSENT = -1


@compiled
def longest_matches(rows: Int64, context: Int64, shortest: int, often: int) -> tuple[Int64, Int64]:
    """The longest suffix of `context` that is stored, and the longest that is stored `often` times.

    Both have at least `shortest` tokens. Returns their lengths, int64 [levels], and their spans,
    int64 [levels * segments, 3], level by level. Each span has its row in the segment's table of
    wide nodes, or -1. There is one level if both suffixes are the same or none is stored that
    often; without a match there is none.
    """
    lows = np.empty((len(context) + 1, len(rows)), dtype=np.int64)
    counts = np.full(len(context) + 1, ABSENT, dtype=np.int64)
    lengths, levels = np.empty(2, dtype=np.int64), 0
    longest = len(context)
    for least in (1, often):
        longest = _longest_seen(rows, context, shortest, longest, least, lows, counts)
        if longest >= shortest and (not levels or lengths[0] != longest):
            lengths[levels] = longest
            levels += 1
    spans = np.empty((levels * len(rows), 3), dtype=np.int64)
    for level in range(levels):
        for index in range(len(rows)):
            low = lows[lengths[level], index]
            spans[level * len(rows) + index] = _span_from(rows, index, low, lengths[level])
    return lengths[:levels], spans


@compiled
def _longest_seen(
    rows: Int64, context: Int64, shortest: int, longest: int, often: int,
    lows: Int64, counts: Int64,
) -> int:  # fmt: skip
    """Length of the longest suffix of `context` that is stored `often` times.

    From `shortest` to `longest`; shortest - 1 if there is none. All suffixes of a stored run are
    stored at least as often, so bisection works. `lows` and `counts` keep, by length, what was
    found.
    """
    low, high = shortest - 1, longest
    while low < high:
        middle = (low + high + 1) // 2
        if counts[middle] == ABSENT:
            counts[middle] = _find_lows(rows, context[len(context) - middle :], lows[middle])
        if counts[middle] >= often:
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def _find_lows(rows: Int64, context: Int64, lows: Int64) -> int:
    """Set in `lows` where each segment's span begins, ABSENT for an empty one.

    Gives how often the context is stored; a segment with a wide span counts as `WIDE`.
    """
    count = 0
    for index in range(len(rows)):
        low, end = bucket(rows, index, context[0])
        low = _first_at(rows, index, context, low, end)
        if low < end and _begins(rows, index, low, context):
            lows[index] = low
            count += _end_nearby(rows, index, low, len(context)) - low
        else:
            lows[index] = ABSENT
    return count


@compiled
def _first_at(rows: Int64, index: int, context: Int64, low: int, high: int) -> int:
    """The first place in low..high whose suffix is not below `context`.

    The suffixes of the span begin with the first token of `context`.
    """
    while low < high:
        middle = (low + high) // 2
        is_below = False
        for depth in range(1, len(context)):
            stored = token(rows, index, middle, depth)
            if stored != context[depth]:
                is_below = stored < context[depth]
                break
        if is_below:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _begins(rows: Int64, index: int, place: int, context: Int64) -> bool:
    """Whether the suffix there, which has the context's first token, begins with all of it."""
    for depth in range(1, len(context)):
        if token(rows, index, place, depth) != context[depth]:
            return False
    return True


@compiled
def _end_nearby(rows: Int64, index: int, low: int, length: int) -> int:
    """The end of the span of `length` tokens that begins at `low`, or low + `WIDE`."""
    end, last = low + 1, min(low + WIDE, rows[index, SIZE])
    while end < last and common_len(rows, index, end) >= length:
        end += 1
    return end


@compiled
def _span_from(rows: Int64, index: int, low: int, length: int) -> tuple[int, int, int]:
    """The span of `length` tokens that begins at `low`, and its row among the wide nodes or -1."""
    if low == ABSENT:
        return 0, 0, -1
    end = _end_nearby(rows, index, low, length)
    if end - low < WIDE:
        return low, end, -1
    node = find_wide(rows, index, low, length)
    return low, wide_node(rows, index, node, HIGH), node
