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
            slot = _slot(text, table[row], text, end, length)
            previous[row, end] = table[row, slot]
            cursor[1 + row] += table[row, slot] == NO_MATCH
            table[row, slot] = end


@compiled
def _slot(text: Int32, table: Int32, source: Int32, end: int, length: int) -> int:
    """Where the n-gram that ends at `end` of `source` stands in the text's table, or may be put."""
    mixed = np.int64(0)
    for place in range(end + 1 - length, end + 1):
        mixed = (mixed ^ np.int64(source[place])) * FACTOR
        mixed ^= mixed >> 29
    slot = mixed & (len(table) - 1)
    while table[slot] != NO_MATCH:
        other = table[slot]
        index = 0
        while index < length and text[other - index] == source[end - index]:
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
            slot = _slot(text, table[row], text, end, length)
            cursor[1 + row] += table[row, slot] == NO_MATCH
            table[row, slot] = end


@compiled
def propose_all(
    rows: Int64,
    max_nodes: Int64,
    assumed: Int32,
    assumed_ends: Int64,
    num_tokens: int,
    num_matches: int,
    window: int,
) -> tuple[Int32, Int32, Float32, Int64]:
    """Tokens, parents, log-probabilities and ends, as in `ProposalBatch`, of a tree for each text.

    It holds what followed the suffix of the text and of what is assumed to follow it: longest
    suffix first, then latest first. Of each match `num_tokens` tokens, until `max_nodes[i]` nodes
    or `num_matches` different continuations are there. Only the text is searched, its latest
    `window` tokens.

    assumed  one text's tokens behind the other's, those of text i up to `assumed_ends[i]`
    """
    tokens = np.empty(max_nodes.sum(), dtype=np.int32)
    parents = np.empty(len(tokens), dtype=np.int32)
    ends = np.empty(len(rows), dtype=np.int64)
    first, first_assumed = 0, 0
    for place in range(len(rows)):
        index, most = index_at(rows, place), max_nodes[place]
        nodes = (tokens[first : first + most], parents[first : first + most])
        own = assumed[first_assumed : assumed_ends[place]]
        limits = (num_tokens, num_matches, window)
        first += _propose(index, nodes, own, rows[place, MAX_NGRAM], limits)
        ends[place], first_assumed = first, assumed_ends[place]
    return tokens[:first], parents[:first], np.zeros(first, dtype=np.float32), ends


@compiled
def _propose(
    index: Index,
    nodes: tuple[Int32, Int32],
    assumed: Int32,
    max_ngram: int,
    limits: tuple[int, int, int],
) -> int:
    text, previous, table, cursor = index
    num_tokens, num_matches, window = limits
    length, count, num_found = cursor[0], 0, 0
    oldest = max(0, length - window)
    # Of the text alone the index knows already where its n-grams stood before.
    tail = _tail(text[:length], assumed, max_ngram) if len(assumed) else assumed
    for row in range(len(previous)):
        if not len(assumed):
            end = previous[row, length - 1]
        elif max_ngram - row <= len(tail):
            end = table[row, _slot(text, table[row], tail, len(tail) - 1, max_ngram - row)]
        else:
            end = NO_MATCH
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
def _tail(text: Int32, following: Int32, count: int) -> Int32:
    """The last tokens of a text and what follows it, at most so many."""
    num_before = min(len(text), max(0, count - len(following)))
    tail = np.empty(num_before + min(count, len(following)), dtype=np.int32)
    tail[:num_before] = text[len(text) - num_before :]
    tail[num_before:] = following[len(following) - (len(tail) - num_before) :]
    return tail


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
