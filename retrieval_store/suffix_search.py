"""Finds contexts among the sorted suffixes of segments, compiled.

A node of a segment's trie is a span (low, high) of its sorted suffixes; high is exclusive. Segments
come as rows (`segment_view`).
"""

from __future__ import annotations

from ..core.compiled import compiled
from ..core.types import Int64
from .segment_view import bucket, common_len, token


@compiled
def first_at(row: Int64, context: Int64, low: int, high: int, beyond: bool) -> int:
    """The first place in low..high whose suffix is not below `context`, or, `beyond`, above it.

    The suffixes of the span begin with the first token of `context`.
    """
    while low < high:
        middle = (low + high) // 2
        order = 0
        for depth in range(1, len(context)):
            found = token(row, middle, depth)
            if found != context[depth]:
                order = -1 if found < context[depth] else 1
                break
        if order < 0 or (beyond and order == 0):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def find(row: Int64, context: Int64) -> tuple[int, int]:
    """The span of all suffixes that begin with `context`; empty if there is none."""
    low, end = bucket(row, context[0])
    low = first_at(row, context, low, end, False)
    return low, first_at(row, context, low, end, True)


@compiled
def count_up_to(rows: Int64, context: Int64, most: int) -> int:
    """min(most, occurrences of `context` in all segments)."""
    count = 0
    for row in rows:
        low, end = bucket(row, context[0])
        low = first_at(row, context, low, end, False)
        if low < end and first_at(row, context, low, low + 1, True) > low:
            count += 1
            low += 1
            while count < most and low < end and common_len(row, low) >= len(context):
                count += 1
                low += 1
        if count >= most:
            return most
    return count


@compiled
def longest_seen(rows: Int64, context: Int64, shortest: int, longest: int, often: int) -> int:
    """Length of the longest suffix of `context` that was seen `often` times.

    From `shortest` to `longest`; shortest - 1 if there is none. Whatever was seen so often, all of
    its own suffixes were.
    """
    low, high = shortest - 1, longest
    while low < high:
        middle = (low + high + 1) // 2
        if count_up_to(rows, context[len(context) - middle :], often) >= often:
            low = middle
        else:
            high = middle - 1
    return low
