"""Compiled maps from n-grams to numbers, which forget the entry that was used longest ago.

A map is four arrays:
entries  int32 [capacity, 2 + longest + values]  USED, the turn of its last use; the LENGTH of its
                                                 n-gram; the n-gram's tokens; values at the end
table    int64 [slots]  entries by a hash of their n-gram, whose upper half stands above the entry,
                        so that most others are ruled out without reading them; NONE where free;
                        a power of two, at least twice the capacity
order    int64 [5]      how many entries there are, how many TURNS were taken, a VACANT entry; of
                        the queue, the PLACE of its next entry and the turn that it was MADE in
queue    int32 [keys]   entries in the order of their last use when it was made; empty for a map
                        that is not at its most keys yet

What is used only gets the number of its turn: neighbours in a list would be two more lines of
memory for each use. The order is made of these numbers when something must be forgotten.
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Int32, Int64
from ...core.compiled import compiled, prefetch

NgramMap = tuple[Int32, Int64, Int64, Int32]

NONE = -1
LAST_USE, LENGTH, TOKENS = range(3)
COUNT, TURNS, VACANT, PLACE, MADE = range(5)
# Numbers of `order`.
ORDER_LEN = 5
FACTOR = 0x1E3779B97F4A7C15
HALF = 32
ENTRY_MASK = (1 << HALF) - 1


def empty_map(
    longest: int, num_values: int, capacity: int, max_keys: int
) -> tuple[Int32, Int64, Int32]:
    """Entries, table and queue for so many n-grams of at most `longest` tokens."""
    slots = 1 << (2 * capacity - 1).bit_length()
    return (
        np.empty((capacity, TOKENS + longest + num_values), dtype=np.int32),
        np.full(slots, NONE, dtype=np.int64),
        np.empty(max_keys if capacity == max_keys else 0, dtype=np.int32),
    )


@compiled
def find(ngrams: NgramMap, ngram: Int32) -> int:
    """The entry of an n-gram; NONE where there is none."""
    return find_hashed(ngrams, ngram, hash_of(ngram))


@compiled
def find_hashed(ngrams: NgramMap, ngram: Int32, hashed: int) -> int:
    """`find`, with the n-gram's hash."""
    word = ngrams[1][_slot(ngrams, ngram, hashed)]
    return NONE if word == NONE else int(word & ENTRY_MASK)


@compiled
def prefetch_slot(ngrams: NgramMap, hashed: int) -> None:
    """Have the slot of an n-gram of this hash read beside what is done next."""
    table = ngrams[1]
    prefetch(table.ctypes.data + 8 * (hashed & (len(table) - 1)))


@compiled
def prefetch_entry(ngrams: NgramMap, hashed: int) -> int:
    """Have its entry read, of which this is the probable number; NONE where there is none."""
    entries, table, _, _ = ngrams
    word = table[hashed & (len(table) - 1)]
    if word == NONE:
        return NONE
    entry = word & ENTRY_MASK
    prefetch(entries.ctypes.data + 4 * entries.shape[1] * entry)
    return int(entry)


@compiled
def use(ngrams: NgramMap, entry: int) -> None:
    """Make an entry the one that was used last."""
    order = ngrams[2]
    ngrams[0][entry, LAST_USE] = order[TURNS]
    order[TURNS] += 1


@compiled
def add(ngrams: NgramMap, ngram: Int32, hashed: int) -> int:
    """A new entry, for an n-gram that has none; its values are NONE. Needs room for it."""
    entries, table, order, _ = ngrams
    entry = int(order[VACANT])
    if entry == NONE:
        entry = int(order[COUNT])
    order[VACANT] = NONE
    order[COUNT] += 1
    table[_slot(ngrams, ngram, hashed)] = _word(hashed, entry)
    row = entries[entry]
    row[LENGTH] = len(ngram)
    for place in range(len(ngram)):
        row[TOKENS + place] = ngram[place]
    row[TOKENS + len(ngram) :] = NONE
    use(ngrams, entry)
    return entry


@compiled
def drop_oldest(ngrams: NgramMap) -> int:
    """Forget the entry that was used longest ago, and return it: the next new one takes it.

    For maps at their most keys.
    """
    entries, _, order, queue = ngrams
    while True:
        if order[PLACE] == len(queue):
            queue[:] = np.argsort(entries[: len(queue), LAST_USE])
            order[PLACE], order[MADE] = 0, order[TURNS]
        entry = int(queue[order[PLACE]])
        order[PLACE] += 1
        # Others were used since.
        if entries[entry, LAST_USE] < order[MADE]:
            break
    _clear(ngrams, _slot(ngrams, _ngram(entries[entry]), hash_of(_ngram(entries[entry]))))
    order[COUNT] -= 1
    order[VACANT] = entry
    return entry


@compiled
def fill_table(ngrams: NgramMap) -> None:
    """Enter all entries in an empty table; the queue is to be made anew."""
    entries, table, order, queue = ngrams
    order[PLACE] = len(queue)
    for entry in range(order[COUNT]):
        ngram = _ngram(entries[entry])
        hashed = hash_of(ngram)
        table[_slot(ngrams, ngram, hashed)] = _word(hashed, entry)


@compiled
def hash_of(ngram: Int32) -> int:
    """A hash of an n-gram, of 64 bits."""
    mixed = np.int64(len(ngram))
    for token in ngram:
        mixed = (mixed ^ np.int64(token)) * FACTOR
        mixed ^= mixed >> 29
    return int(mixed)


@compiled
def _ngram(row: Int32) -> Int32:
    return row[TOKENS : TOKENS + row[LENGTH]]


@compiled
def _word(hashed: int, entry: int) -> int:
    return int((hashed & ~ENTRY_MASK) | entry)


@compiled
def _clear(ngrams: NgramMap, slot: int) -> None:
    """Free a slot, and close the gap in the run of slots that it is in."""
    entries, table, _, _ = ngrams
    mask = len(table) - 1
    gap, probed = slot, (slot + 1) & mask
    while table[probed] != NONE:
        home = hash_of(_ngram(entries[table[probed] & ENTRY_MASK])) & mask
        if (probed - home) & mask >= (probed - gap) & mask:
            table[gap] = table[probed]
            gap = probed
        probed = (probed + 1) & mask
    table[gap] = NONE


@compiled
def _slot(ngrams: NgramMap, ngram: Int32, hashed: int) -> int:
    """Where an n-gram stands in the table, or may be put."""
    entries, table, _, _ = ngrams
    slot = hashed & (len(table) - 1)
    while table[slot] != NONE:
        if (table[slot] ^ hashed) >> HALF == 0:
            row = entries[table[slot] & ENTRY_MASK]
            if row[LENGTH] == len(ngram):
                place = 0
                while place < len(ngram) and row[TOKENS + place] == ngram[place]:
                    place += 1
                if place == len(ngram):
                    break
        slot = (slot + 1) & (len(table) - 1)
    return int(slot)
