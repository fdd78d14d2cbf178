"""Compiled maps from n-grams to numbers that keep their order and forget the oldest entry.

A map is three arrays:
entries  int32 [capacity, 6 + longest]  BEFORE and AFTER, the neighbours in the order of use, the
                                        LENGTH of its n-gram, three values, and the n-gram's tokens
table    int32 [slots]                  entries by a hash of their n-gram, NONE where free; a power
                                        of two, at least twice the capacity
order    int64 [3]                      how many entries there are, the OLDEST and the LATEST
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Int32, Int64
from ...core.compiled import compiled

NgramMap = tuple[Int32, Int32, Int64]

NONE = -1
BEFORE, AFTER, LENGTH, VALUE = range(4)
# Three values, then the tokens.
TOKENS = VALUE + 3
COUNT, OLDEST, LATEST = range(3)
FACTOR = 0x1E3779B97F4A7C15


def empty_map(longest: int, capacity: int) -> tuple[Int32, Int32]:
    """Entries and table for so many n-grams of at most `longest` tokens."""
    slots = 1 << (2 * capacity - 1).bit_length()
    entries = np.empty((capacity, TOKENS + longest), dtype=np.int32)
    return entries, np.full(slots, NONE, dtype=np.int32)


@compiled
def find(ngrams: NgramMap, ngram: Int32) -> int:
    """The entry of an n-gram; NONE where there is none."""
    return int(ngrams[1][_slot(ngrams, ngram)])


@compiled
def put(ngrams: NgramMap, ngram: Int32) -> int:
    """The entry of an n-gram, now the latest; needs room for one that is new.

    The values of a new one are NONE.
    """
    entries, table, order = ngrams
    slot = _slot(ngrams, ngram)
    entry = int(table[slot])
    if entry == NONE:
        entry = int(order[COUNT])
        order[COUNT] += 1
        table[slot] = entry
        row = entries[entry]
        row[LENGTH] = len(ngram)
        row[VALUE:TOKENS] = NONE
        for place in range(len(ngram)):
            row[TOKENS + place] = ngram[place]
    else:
        _unlink(ngrams, entry)
    row = entries[entry]
    row[BEFORE], row[AFTER] = order[LATEST], NONE
    if order[LATEST] != NONE:
        entries[order[LATEST], AFTER] = entry
    else:
        order[OLDEST] = entry
    order[LATEST] = entry
    return entry


@compiled
def drop_oldest(ngrams: NgramMap) -> None:
    """Forget the oldest entry; the last one takes its place in the array."""
    entries, table, order = ngrams
    entry = int(order[OLDEST])
    _clear(ngrams, _slot(ngrams, entries[entry, TOKENS : TOKENS + entries[entry, LENGTH]]))
    _unlink(ngrams, entry)
    order[COUNT] -= 1
    last = int(order[COUNT])
    if last == entry:
        return
    table[_slot(ngrams, entries[last, TOKENS : TOKENS + entries[last, LENGTH]])] = entry
    entries[entry] = entries[last]
    before, after = entries[entry, BEFORE], entries[entry, AFTER]
    if before == NONE:
        order[OLDEST] = entry
    else:
        entries[before, AFTER] = entry
    if after == NONE:
        order[LATEST] = entry
    else:
        entries[after, BEFORE] = entry


@compiled
def fill_table(ngrams: NgramMap) -> None:
    """Enter all entries in an empty table."""
    entries, table, order = ngrams
    for entry in range(order[COUNT]):
        slot = _slot(ngrams, entries[entry, TOKENS : TOKENS + entries[entry, LENGTH]])
        table[slot] = entry


@compiled
def _unlink(ngrams: NgramMap, entry: int) -> None:
    entries, _, order = ngrams
    before, after = entries[entry, BEFORE], entries[entry, AFTER]
    if before == NONE:
        order[OLDEST] = after
    else:
        entries[before, AFTER] = after
    if after == NONE:
        order[LATEST] = before
    else:
        entries[after, BEFORE] = before


@compiled
def _clear(ngrams: NgramMap, slot: int) -> None:
    """Free a slot, and close the gap in the run of slots that it is in."""
    entries, table, _ = ngrams
    mask = len(table) - 1
    gap, probed = slot, (slot + 1) & mask
    while table[probed] != NONE:
        row = entries[table[probed]]
        home = _hash(row[TOKENS : TOKENS + row[LENGTH]]) & mask
        if (probed - home) & mask >= (probed - gap) & mask:
            table[gap] = table[probed]
            gap = probed
        probed = (probed + 1) & mask
    table[gap] = NONE


@compiled
def _slot(ngrams: NgramMap, ngram: Int32) -> int:
    """Where an n-gram stands in the table, or may be put."""
    entries, table, _ = ngrams
    slot = _hash(ngram) & (len(table) - 1)
    while table[slot] != NONE:
        row = entries[table[slot]]
        if row[LENGTH] == len(ngram):
            place = 0
            while place < len(ngram) and row[TOKENS + place] == ngram[place]:
                place += 1
            if place == len(ngram):
                break
        slot = (slot + 1) & (len(table) - 1)
    return int(slot)


@compiled
def _hash(ngram: Int32) -> int:
    mixed = np.int64(len(ngram))
    for token in ngram:
        mixed = (mixed ^ np.int64(token)) * FACTOR
        mixed ^= mixed >> 29
    return int(mixed)
