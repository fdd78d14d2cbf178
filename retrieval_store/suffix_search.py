"""Walks the trie of one segment: finds a context, lists the children of a node."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..core.types import Int64
from .segment import SEPARATOR, Segment

TOKEN = struct.Struct(">I")
TOKEN_BYTES = TOKEN.size

Span = tuple[int, int]
Bisect = Callable[..., int]


class SuffixSearch:
    """Reads one segment. A node is a span (low, high) of its sorted suffixes; high is exclusive.

    Holds views only, so it is cheap to make and safe to share between threads. Bisection slices
    the raw bytes: a comparison of Python bytes costs a tenth of one of numpy arrays.
    """

    __slots__ = ("_common", "_data", "_first_places", "_segment", "_start", "_suffixes")

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._data = segment.data
        self._start = segment.text_start
        self._suffixes = segment.suffixes.data
        self._common = segment.common_lens.data
        self._first_places = segment.first_places.data

    def count_up_to(self, context: bytes, most: int) -> int:
        """min(most, occurrences of `context`), which is big-endian uint32 tokens; at least one."""
        low, end = self._bucket(context)
        low = self._bisect(bisect_left, context, low, end)
        if low == end or self._differs(low, context):
            return 0
        length, count = len(context) // TOKEN_BYTES, 1
        common = self._common
        while count < most and low + count < end and common[low + count] >= length:
            count += 1
        return count

    def find(self, context: bytes) -> Span:
        """The span of all suffixes that begin with `context`; empty if there is none."""
        low, end = self._bucket(context)
        low = self._bisect(bisect_left, context, low, end)
        return low, self._bisect(bisect_right, context, low, end)

    def token(self, low: int, depth: int) -> int:
        """The token at `depth` of the suffix at `low`."""
        at = self._start + TOKEN_BYTES * (self._suffixes[low] + depth)
        return TOKEN.unpack_from(self._data, at)[0]

    def children(self, span: Span, depth: int) -> list[tuple[int, int, int]]:
        """(token, low, high) of each child of a node of `depth` tokens, by token."""
        low, high = span
        common = self._common
        found = []
        for place in range(low + 1, high):
            if common[place] == depth:
                found.append((self.token(low, depth), low, place))
                low = place
        found.append((self.token(low, depth), low, high))
        if found[-1][0] == SEPARATOR:
            found.pop()
        return found

    def child_arrays(self, span: Span, depth: int) -> tuple[Int64, Int64, Int64]:
        """The same as `children`, as three int64 arrays; the faster form for wide spans."""
        low, high = span
        breaks = np.flatnonzero(self._segment.common_lens[low + 1 : high] == depth) + (low + 1)
        lows: NDArray[np.int64] = np.concatenate(([low], breaks))
        highs: NDArray[np.int64] = np.concatenate((breaks, [high]))
        at = self._segment.suffixes[lows].astype(np.int64) + depth
        tokens = self._segment.text[at].astype(np.int64)
        last = len(tokens) - 1 if tokens[-1] == SEPARATOR else len(tokens)
        return tokens[:last], lows[:last], highs[:last]

    def _bucket(self, context: bytes) -> Span:
        """The span of the suffixes that begin with the first token of `context`."""
        token = TOKEN.unpack_from(context)[0]
        if token >= self._segment.header.vocab_size:
            return 0, 0
        return self._first_places[token], self._first_places[token + 1]

    def _bisect(self, side: Bisect, context: bytes, low: int, high: int) -> int:
        data, start, size = self._data, self._start, len(context)
        return side(
            self._suffixes,
            context,
            low,
            high,
            key=lambda p: data[start + TOKEN_BYTES * p : start + TOKEN_BYTES * p + size],
        )

    def _differs(self, place: int, context: bytes) -> bool:
        at = self._start + TOKEN_BYTES * self._suffixes[place]
        return self._data[at : at + len(context)] != context
