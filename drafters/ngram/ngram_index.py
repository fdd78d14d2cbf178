"""The compiled loops of prompt lookup: for every n-gram of a text, where it stood before.

An index is four arrays, which a request keeps and which all requests' calls take by their addresses
(`core/compiled.py`); one column of a row each, and their sizes:
text      int32 [capacity]           the tokens
previous  int32 [lengths, capacity]  of the n-gram of each length that ends at a place: where it
                                     ended before; NO_MATCH if nowhere
table     int32 [lengths, slots]     by a hash of an n-gram: where it ended last; a power of two
cursor    int64 [1 + lengths]        tokens so far; slots that are taken, of each length

Lengths stand in falling order. The text's own suffix is the latest occurrence of its n-gram, so
matches are found by following `previous` from the end, without hashing.
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import ROOT, Float32, Int32, Int64
from ...core.compiled import compiled, int32_at, int32_rows_at, int64_at

Index = tuple[Int32, Int32, Int32, Int64]

NO_MATCH = -1
# Columns of a row.
TEXT, PREVIOUS, TABLE, CURSOR, CAPACITY, NUM_SLOTS, NUM_LENGTHS, MAX_NGRAM = range(8)
# In a run of one token every position matches; more than a few of them add nothing.
MATCHES_TRIED_PER_LENGTH = 8
FACTOR = 0x1E3779B97F4A7C15


@compiled
def index_at(rows: Int64, place: int) -> Index:
    """The arrays that a row names."""
    row = rows[place]
    return (
        int32_at(row[TEXT], row[CAPACITY]),
        int32_rows_at(row[PREVIOUS], row[NUM_LENGTHS], row[CAPACITY]),
        int32_rows_at(row[TABLE], row[NUM_LENGTHS], row[NUM_SLOTS]),
        int64_at(row[CURSOR], 1 + row[NUM_LENGTHS]),
    )


@compiled
def extend_all(rows: Int64, tokens: Int32, ends: Int64) -> None:
    """Append tokens to the texts, those of text i up to `ends[i]`. Needs room for them."""
    first = 0
    for place in range(len(rows)):
        index = index_at(rows, place)
        for token in tokens[first : ends[place]]:
            _append(index, token, rows[place, MAX_NGRAM])
        first = ends[place]


@compiled
def _append(index: Index, token: int, max_ngram: int) -> None:
    text, previous, table, cursor = index
    end = cursor[0]
    text[end] = token
    cursor[0] += 1
    for row in range(len(previous)):
        length = max_ngram - row
        previous[row, end] = NO_MATCH
        if end + 1 >= length:
            slot = _slot(text, table[row], end, length)
            previous[row, end] = table[row, slot]
            cursor[1 + row] += table[row, slot] == NO_MATCH
            table[row, slot] = end


@compiled
def _slot(text: Int32, table: Int32, end: int, length: int) -> int:
    """Where the n-gram that ends at `end` stands in its table, or may be put."""
    mixed = np.int64(0)
    for place in range(end + 1 - length, end + 1):
        mixed = (mixed ^ np.int64(text[place])) * FACTOR
        mixed ^= mixed >> 29
    slot = mixed & (len(table) - 1)
    while table[slot] != NO_MATCH:
        other = table[slot]
        index = 0
        while index < length and text[other - index] == text[end - index]:
            index += 1
        if index == length:
            break
        slot = (slot + 1) & (len(table) - 1)
    return int(slot)


@compiled
def refill(index: Index, oldest: int, max_ngram: int) -> None:
    """Enter the latest end of every n-gram that ends at `oldest` or later in the empty table."""
    text, previous, table, cursor = index
    for row in range(len(previous)):
        length = max_ngram - row
        cursor[1 + row] = 0
        for end in range(max(oldest, length - 1), cursor[0]):
            slot = _slot(text, table[row], end, length)
            cursor[1 + row] += table[row, slot] == NO_MATCH
            table[row, slot] = end


@compiled
def propose_all(
    rows: Int64, max_nodes: Int64, num_tokens: int, num_matches: int, window: int
) -> tuple[Int32, Int32, Float32, Int64]:
    """Tokens, parents, log-probabilities and ends, as in `ProposalBatch`, of a tree for each text.

    It holds what followed the text's suffix: longest suffix first, then latest first. Of each match
    `num_tokens` tokens, until `max_nodes[i]` nodes or `num_matches` different continuations are
    there. Only the latest `window` tokens are searched.
    """
    tokens = np.empty(max_nodes.sum(), dtype=np.int32)
    parents = np.empty(len(tokens), dtype=np.int32)
    ends = np.empty(len(rows), dtype=np.int64)
    first = 0
    for place in range(len(rows)):
        index, most = index_at(rows, place), max_nodes[place]
        nodes = (tokens[first : first + most], parents[first : first + most])
        first += _propose(index, nodes, num_tokens, num_matches, window)
        ends[place] = first
    return tokens[:first], parents[:first], np.zeros(first, dtype=np.float32), ends


@compiled
def _propose(
    index: Index, nodes: tuple[Int32, Int32], num_tokens: int, num_matches: int, window: int
) -> int:
    text, previous, _, cursor = index
    length, count, num_found = cursor[0], 0, 0
    oldest = max(0, length - window)
    for row in range(len(previous)):
        end = previous[row, length - 1]
        for _ in range(MATCHES_TRIED_PER_LENGTH):
            if end < oldest:
                break
            before = count
            count = add_path(nodes, count, text[end + 1 : min(end + 1 + num_tokens, length)])
            num_found += count > before
            if count == len(nodes[0]) or num_found == num_matches:
                return count
            end = previous[row, end]
    return count


@compiled
def add_path(nodes: tuple[Int32, Int32], count: int, path: Int32) -> int:
    """Merge a path below the root in a forest of `count` nodes, as far as there is room.

    `nodes` are tokens and parents. Gives the new number of nodes.
    """
    tokens, parents = nodes
    parent = ROOT
    for token in path:
        node = parent + 1
        while node < count and (parents[node] != parent or tokens[node] != token):
            node += 1
        if node == count:
            if count == len(tokens):
                break
            tokens[node], parents[node] = token, parent
            count += 1
        parent = node
    return count
