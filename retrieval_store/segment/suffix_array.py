"""Sorts all positions of a text by the tokens that follow them, in compiled loops.

The positions are put in buckets by their first token, in one pass. Then, level by level, every
group of positions that agree so far is sorted by its next few tokens, packed into one number of 64
bits each: as many as fit. That reads the text once a level and only where suffixes are still equal,
while a comparison sort over the text would miss the cache at every comparison. All sorts are
stable, so equal suffixes stay in order of position.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...core.arrays import Int64
from ...core.compiled import compiled

KEY_BITS = 64
# Length of the runs that are sorted by insertion before runs are merged.
RUN = 16

Uint32 = NDArray[np.uint32]
Uint8 = NDArray[np.uint8]
Uint64 = NDArray[np.uint64]


def sort_suffixes(text: Uint32, depth: int) -> tuple[Uint32, Uint8]:
    """Positions of `text` [n], sorted by the next `depth` tokens, equal ones by position.

    The end of the text sorts before every token. Tokens are below 2**32 - 2, or 2**32 - 1, the
    separator of documents. Gives uint32 [n] and, as uint8 [n], how many tokens each suffix shares
    with the one before it, at most `depth`; 0 for the first. Takes 5 bytes of memory a token, and
    20 more for each position of the most frequent token.
    """
    suffixes = np.empty(len(text), dtype=np.uint32)
    lens = np.zeros(len(text), dtype=np.uint8)
    if len(text):
        separator = np.uint32(0xFFFFFFFF)
        largest = int(text.max(initial=0, where=text != separator))
        largest_bucket = _into_buckets(text, largest + 1, suffixes, lens)
        # One code more for the end of the text, and one for the separator.
        _sort_groups(text, suffixes, lens, (largest + 2).bit_length(), largest_bucket, depth)
    return suffixes, lens


@compiled
def _into_buckets(text: Uint32, vocab_size: int, suffixes: Uint32, lens: Uint8) -> int:
    """Sort by the first token, mark who shares it, and give the size of the largest bucket."""
    places = np.zeros(vocab_size + 2, dtype=np.int64)
    for token in text:
        places[min(np.int64(token), vocab_size) + 1] += 1
    largest = places.max()
    places = places.cumsum()
    starts = places.copy()
    for position in range(len(text)):
        bucket = min(np.int64(text[position]), vocab_size)
        place = places[bucket]
        suffixes[place] = position
        lens[place] = 1 if place > starts[bucket] else 0
        places[bucket] += 1
    return int(largest)


@compiled
def _sort_groups(
    text: Uint32, suffixes: Uint32, lens: Uint8, bits: int, largest: int, depth: int
) -> None:
    """Sort the groups that share their first token by the tokens after it."""
    keys, spare_keys = np.empty(largest, dtype=np.uint64), np.empty(largest, dtype=np.uint64)
    spare = np.empty(largest, dtype=np.uint32)
    at = 1
    while at < depth:
        width = min(KEY_BITS // bits, depth - at)
        low = 0
        while low < len(suffixes):
            high = low + 1
            while high < len(suffixes) and lens[high] >= at:
                high += 1
            if high - low > 1:
                group = suffixes[low:high]
                _read_keys(text, group, at, width, bits, keys)
                _merge_sort(keys, group, spare_keys, spare)
                for place in range(low + 1, high):
                    same = _shared(keys[place - low - 1] ^ keys[place - low], width, bits)
                    lens[place] = at + same
            low = high
        at += width


@compiled
def _read_keys(text: Uint32, group: Uint32, at: int, width: int, bits: int, keys: Uint64) -> None:
    """The tokens at..at + width of each suffix as one number, the first one highest."""
    separator = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for index in range(len(group)):
        key = np.uint64(0)
        start = np.int64(group[index]) + at
        for place in range(start, start + width):
            key <<= np.uint64(bits)
            if place < len(text):
                key |= min(np.uint64(text[place]) + np.uint64(1), separator)
        keys[index] = key


@compiled
def _shared(difference: int, width: int, bits: int) -> int:
    """How many of the `width` tokens two keys share, from the bits in which they differ."""
    same, rest = width, np.uint64(difference)
    while rest:
        rest >>= np.uint64(bits)
        same -= 1
    return same


@compiled
def _merge_sort(keys: Uint64, group: Uint32, spare_keys: Uint64, spare: Uint32) -> None:
    """Sort `group` by the first len(group) `keys`, and these with it; stable."""
    count = len(group)
    for low in range(0, count, RUN):
        _insertion_sort(keys, group, low, min(low + RUN, count))
    width = RUN
    while width < count:
        for low in range(0, count - width, 2 * width):
            middle, high = low + width, min(low + 2 * width, count)
            if keys[middle - 1] > keys[middle]:
                _merge(keys, group, spare_keys, spare, np.array([low, middle, high]))
        width *= 2


@compiled
def _insertion_sort(keys: Uint64, group: Uint32, low: int, high: int) -> None:
    for place in range(low + 1, high):
        key, position = keys[place], group[place]
        while place > low and keys[place - 1] > key:
            keys[place], group[place] = keys[place - 1], group[place - 1]
            place -= 1  # noqa: PLW2901 - it walks to where the key belongs
        keys[place], group[place] = key, position


@compiled
def _merge(keys: Uint64, group: Uint32, spare_keys: Uint64, spare: Uint32, bounds: Int64) -> None:
    """Merge two neighbouring sorted runs, low..middle and middle..high."""
    low, middle, high = bounds
    left_size = middle - low
    spare_keys[:left_size], spare[:left_size] = keys[low:middle], group[low:middle]
    left, right, place = 0, middle, low
    while left < left_size and right < high:
        if spare_keys[left] <= keys[right]:
            keys[place], group[place] = spare_keys[left], spare[left]
            left += 1
        else:
            keys[place], group[place] = keys[right], group[right]
            right += 1
        place += 1
    rest = left_size - left
    keys[place : place + rest] = spare_keys[left:left_size]
    group[place : place + rest] = spare[left:left_size]
