"""The compiled loops of SPECTRA: its two dictionaries, and guesses by them, for all requests.

What they mean is in `ngram_dictionaries.py`. A request keeps six arrays, which go into the loops by
their addresses; one column of a row each, and their sizes:
forward        map (`ngram_maps.py`) of single tokens: the OLDEST and LATEST continuation, and how
               many there are
backward       map of sequences: the token that followed last
continuations  int32 [capacity, 3 + longest]  neighbours in their token's list, length, tokens
cursor         int64 [8 + ngram]  orders of both maps; continuations so far, and the first that is
               free again; then the last tokens of the text, and before them how many there are
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Float32, Int32, Int64
from ...core.compiled import compiled, int32_at, int32_rows_at, int64_at
from .ngram_index import add_path
from .ngram_maps import (
    AFTER,
    BEFORE,
    COUNT,
    LENGTH,
    NONE,
    OLDEST,
    TOKENS,
    VALUE,
    NgramMap,
    drop_oldest,
    find,
    put,
)

Tables = tuple[NgramMap, NgramMap, Int32, Int64]

# Columns of a row: addresses, sizes, and the request's settings.
(
    FORWARD, FORWARD_TABLE, BACKWARD, BACKWARD_TABLE, CONTINUATIONS, CURSOR,
    FORWARD_SIZE, FORWARD_SLOTS, BACKWARD_SIZE, BACKWARD_SLOTS, NUM_CONTINUATIONS,
    NGRAM, CAPACITY, MAX_KEYS, SHORTEST,
) = range(15)  # fmt: skip
# Of the cursor.
USED, FREE, TAIL_LEN, TAIL = 6, 7, 8, 9
# Values of a forward entry; that of a backward one is VALUE.
FIRST, LAST, HELD = VALUE, VALUE + 1, VALUE + 2
# Of a continuation, BEFORE, AFTER and LENGTH come first.
PATH = 3


@compiled
def tables_at(rows: Int64, place: int) -> Tables:
    """The arrays that a row names."""
    row = rows[place]
    longest = row[NGRAM] - 1
    cursor = int64_at(row[CURSOR], TAIL + row[NGRAM])
    forward = (
        int32_rows_at(row[FORWARD], row[FORWARD_SIZE], TOKENS + 1),
        int32_at(row[FORWARD_TABLE], row[FORWARD_SLOTS]),
        cursor[:3],
    )
    backward = (
        int32_rows_at(row[BACKWARD], row[BACKWARD_SIZE], TOKENS + longest),
        int32_at(row[BACKWARD_TABLE], row[BACKWARD_SLOTS]),
        cursor[3:6],
    )
    continuations = int32_rows_at(row[CONTINUATIONS], row[NUM_CONTINUATIONS], PATH + longest)
    return forward, backward, continuations, cursor


@compiled
def learn_all(  # noqa: PLR0917 - compiled functions take no options by name
    rows: Int64, ngrams: Int32, ngram_ends: Int64, tokens: Int32, ends: Int64, settings: Int64
) -> None:
    """Learn n-grams of the pool and then the text of each request.

    ngrams, ngram_ends  int32 [n, ngram], and where those of each request end
    tokens, ends        the text's next tokens likewise
    settings            int64 [2]  1 or 0: n-grams are learned from every start, the text is learned
    """
    first, first_ngram = 0, 0
    for place in range(len(rows)):
        tables = tables_at(rows, place)
        for ngram in ngrams[first_ngram : ngram_ends[place]]:
            starts = len(ngram) - 1 if settings[0] else 1
            for start in range(starts):
                for length in range(rows[place, SHORTEST], len(ngram) - start + 1):
                    _learn(tables, ngram[start : start + length], rows[place])
        for token in tokens[first : ends[place]]:
            _append(tables, token, rows[place], settings[1])
        first, first_ngram = ends[place], ngram_ends[place]


@compiled
def _append(tables: Tables, token: int, row: Int64, is_learned: int) -> None:
    """Continue the text, learning every n-gram that ends at the new token."""
    cursor, ngram = tables[3], row[NGRAM]
    if cursor[TAIL_LEN] == ngram:
        for place in range(ngram - 1):
            cursor[TAIL + place] = cursor[TAIL + place + 1]
        cursor[TAIL_LEN] -= 1
    cursor[TAIL + cursor[TAIL_LEN]] = token
    cursor[TAIL_LEN] += 1
    if is_learned:
        tail = cursor[TAIL : TAIL + cursor[TAIL_LEN]].astype(np.int32)
        for length in range(row[SHORTEST], len(tail) + 1):
            _learn(tables, tail[len(tail) - length :], row)


@compiled
def _learn(tables: Tables, ngram: Int32, row: Int64) -> None:
    forward, backward, continuations, cursor = tables
    entry = find(forward, ngram[:1])
    if entry == NONE and forward[2][COUNT] == row[MAX_KEYS]:
        _free_all(forward, continuations, cursor)
        drop_oldest(forward)
    entry = put(forward, ngram[:1])
    if forward[0][entry, HELD] == NONE:
        forward[0][entry, HELD] = 0
    _continue(forward[0][entry], continuations, cursor, ngram[1:], row[CAPACITY])
    sequence = ngram[: len(ngram) - 1]
    if find(backward, sequence) == NONE and backward[2][COUNT] == row[MAX_KEYS]:
        drop_oldest(backward)
    backward[0][put(backward, sequence), VALUE] = ngram[len(ngram) - 1]


@compiled
def _continue(
    entry: Int32, continuations: Int32, cursor: Int64, path: Int32, capacity: int
) -> None:
    """Make a path the latest continuation of an entry's token."""
    known = _known(entry, continuations, path)
    if known != NONE:
        _remove(entry, continuations, known)
        if continuations[known, LENGTH] < len(path):
            _write(continuations, known, path)
    else:
        if entry[HELD] == capacity:
            first = entry[FIRST]
            _remove(entry, continuations, first)
            continuations[first, AFTER] = cursor[FREE]
            cursor[FREE] = first
        known = int(cursor[FREE])
        if known == NONE:
            known = int(cursor[USED])
            cursor[USED] += 1
        else:
            cursor[FREE] = continuations[known, AFTER]
        _write(continuations, known, path)
    row = continuations[known]
    row[BEFORE], row[AFTER] = entry[LAST], NONE
    if entry[LAST] != NONE:
        continuations[entry[LAST], AFTER] = known
    else:
        entry[FIRST] = known
    entry[LAST] = known
    entry[HELD] += 1


@compiled
def _known(entry: Int32, continuations: Int32, path: Int32) -> int:
    """The continuation that a path takes the place of, or that says it already.

    That is the path without its last token; else the path itself; else the latest that begins with
    it. NONE where there is none.
    """
    prefix, same, longer = NONE, NONE, NONE
    known = entry[LAST]
    while known != NONE:
        row = continuations[known]
        shared = 0
        while shared < len(path) and shared < row[LENGTH] and row[PATH + shared] == path[shared]:
            shared += 1
        if shared == len(path) - 1 and row[LENGTH] == shared:
            prefix = known
        elif shared == len(path):
            if row[LENGTH] == shared:
                same = known
            elif longer == NONE:
                longer = known
        known = row[BEFORE]
    if prefix != NONE:
        return prefix
    return longer if same == NONE else same


@compiled
def _remove(entry: Int32, continuations: Int32, known: int) -> None:
    before, after = continuations[known, BEFORE], continuations[known, AFTER]
    if before == NONE:
        entry[FIRST] = after
    else:
        continuations[before, AFTER] = after
    if after == NONE:
        entry[LAST] = before
    else:
        continuations[after, BEFORE] = before
    entry[HELD] -= 1


@compiled
def _free_all(forward: NgramMap, continuations: Int32, cursor: Int64) -> None:
    """Free all continuations of the oldest token."""
    known = forward[0][forward[2][OLDEST], FIRST]
    while known != NONE:
        following = continuations[known, AFTER]
        continuations[known, AFTER] = cursor[FREE]
        cursor[FREE] = known
        known = following


@compiled
def _write(continuations: Int32, known: int, path: Int32) -> None:
    continuations[known, LENGTH] = len(path)
    for place in range(len(path)):
        continuations[known, PATH + place] = path[place]


@compiled
def knows(rows: Int64, token: int) -> bool:
    """Whether n-grams that begin with a token are known to the request of the first row."""
    forward, _, _, _ = tables_at(rows, 0)
    return find(forward, np.array([token], dtype=np.int32)) != NONE


@compiled
def guess_all(
    rows: Int64, max_nodes: Int64, settings: Int64
) -> tuple[Int32, Int32, Float32, Int64]:
    """Tokens, parents, log-probabilities and ends, as in `ProposalBatch`, of a tree for each text.

    settings: int64 [3]  most guesses; most tokens of the backward one, 0 for none; 1 or 0: there
    are forward guesses
    """
    tokens = np.empty(max_nodes.sum(), dtype=np.int32)
    parents = np.empty(len(tokens), dtype=np.int32)
    ends = np.empty(len(rows), dtype=np.int64)
    first = 0
    for place in range(len(rows)):
        most = max_nodes[place]
        nodes = (tokens[first : first + most], parents[first : first + most])
        first += _guess(tables_at(rows, place), nodes, rows[place, NGRAM], settings)
        ends[place] = first
    return tokens[:first], parents[:first], np.zeros(first, dtype=np.float32), ends


@compiled
def _guess(tables: Tables, nodes: tuple[Int32, Int32], ngram: int, settings: Int64) -> int:
    forward, backward, continuations, cursor = tables
    count, num_left = 0, settings[0]
    tail = cursor[TAIL : TAIL + cursor[TAIL_LEN]].astype(np.int32)
    if settings[1]:
        guess = _backward_guess(backward, tail[max(0, len(tail) - ngram + 1) :], ngram, settings[1])
        if len(guess):
            count = add_path(nodes, count, guess)
            num_left -= 1
    entry = find(forward, tail[len(tail) - 1 :]) if settings[2] else NONE
    known = NONE if entry == NONE else forward[0][entry, LAST]
    while known != NONE and num_left and count < len(nodes[0]):
        row = continuations[known]
        count = add_path(nodes, count, row[PATH : PATH + row[LENGTH]])
        num_left -= 1
        known = row[BEFORE]
    return count


@compiled
def _backward_guess(backward: NgramMap, context: Int32, ngram: int, guess_len: int) -> Int32:
    """Grow a guess, each token by the longest known suffix of at most `ngram` - 1 tokens."""
    text = np.empty(len(context) + guess_len, dtype=np.int32)
    text[: len(context)] = context
    end = len(context)
    while end < len(text):
        first = max(0, end - ngram + 1)
        entry = NONE
        while first < end and entry == NONE:
            entry = find(backward, text[first:end])
            first += 1
        if entry == NONE:
            break
        text[end] = backward[0][entry, VALUE]
        end += 1
    return text[len(context) : end]
