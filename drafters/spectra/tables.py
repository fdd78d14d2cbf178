"""The compiled loops of SPECTRA's two dictionaries and of their guesses, for all requests.

A request keeps some arrays, which go into the loops by their addresses; one column of a row each,
and their sizes:
forward        map (`ngram/ngram_maps.py`) of single tokens: the OLDEST and LATEST continuation, and
               how many there are
backward       map of sequences: the token that followed last
continuations  int32 [capacity, 3 + longest]  neighbours in their token's list, length, tokens
cursor         int64 [14 + ngram]  orders of both maps; continuations so far, and the first that is
               free again; whether one may begin another; then the last tokens of the text, and
               before them how many there are
pool           (`pool.py`)
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Bool, Float32, Int32, Int64
from ...core.compiled import compiled, int32_at, int32_rows_at, int64_at, prefetch
from ..ngram.ngram_maps import (
    COUNT,
    NONE,
    ORDER_LEN,
    TOKENS,
    NgramMap,
    add,
    drop_oldest,
    find,
    find_hashed,
    hash_of,
    prefetch_entry,
    prefetch_slot,
    use,
)
from ..ngram.prompt_lookup import add_path
from .pool import advance, refine

Tables = tuple[NgramMap, NgramMap, Int32, Int64]

# Columns of a row: addresses, sizes, and the request's settings.
(
    FORWARD, FORWARD_TABLE, FORWARD_QUEUE, BACKWARD, BACKWARD_TABLE, BACKWARD_QUEUE,
    CONTINUATIONS, POOL, CURSOR, FORWARD_SIZE, FORWARD_SLOTS, FORWARD_QUEUED,
    BACKWARD_SIZE, BACKWARD_SLOTS, BACKWARD_QUEUED, NUM_CONTINUATIONS, POOL_SIZE,
    NGRAM, CAPACITY, MAX_KEYS, SHORTEST, KEEPS_PREFIXES,
) = range(22)  # fmt: skip
# Of the cursor.
USED, FREE, IS_NESTED, TAIL_LEN, TAIL = range(2 * ORDER_LEN, 2 * ORDER_LEN + 5)
# Values of a forward entry, which has one token; that of a backward one is its last number.
FIRST, LAST, HELD = range(TOKENS + 1, TOKENS + 4)
# Of a continuation.
BEFORE, AFTER, LENGTH = range(3)
PATH = 3
# More tokens than these are a prompt, whose n-grams would not stay in the cache until their turn.
PREFETCHED = 32
# Of the settings.
MAX_GUESSES, GUESS_LEN, HAS_FORWARD, FORWARD_FIRST = range(4)


@compiled
def tables_at(rows: Int64, place: int) -> Tables:
    """The arrays that a row names, but the pool."""
    row = rows[place]
    longest = row[NGRAM] - 1
    cursor = int64_at(row[CURSOR], TAIL + row[NGRAM])
    forward = (
        int32_rows_at(row[FORWARD], row[FORWARD_SIZE], TOKENS + 4),
        int64_at(row[FORWARD_TABLE], row[FORWARD_SLOTS]),
        cursor[:ORDER_LEN],
        int32_at(row[FORWARD_QUEUE], row[FORWARD_QUEUED]),
    )
    backward = (
        int32_rows_at(row[BACKWARD], row[BACKWARD_SIZE], TOKENS + longest + 1),
        int64_at(row[BACKWARD_TABLE], row[BACKWARD_SLOTS]),
        cursor[ORDER_LEN : 2 * ORDER_LEN],
        int32_at(row[BACKWARD_QUEUE], row[BACKWARD_QUEUED]),
    )
    continuations = int32_rows_at(row[CONTINUATIONS], row[NUM_CONTINUATIONS], PATH + longest)
    return forward, backward, continuations, cursor


@compiled
def learn_all(
    rows: Int64,
    answers: Int32,
    shapes: Int64,
    explore: Bool,
    tokens: Int32,
    ends: Int64,
    settings: Int64,
) -> None:
    """Learn the n-grams that the pools complete and then the text of each request.

    answers, shapes  the answers to the pools' probes, one behind the other, and int64 [requests, 2]
                     how many rows and columns each has; none for a pool that stays as it is
    explore          bool [rows of all answers]  whether an unknown token is looked for
    tokens, ends     the text's next tokens, and where those of each request end
    settings         int64 [2]  1 or 0: n-grams are learned from every start, the text is learned
    """
    first, first_answer, first_row = 0, 0, 0
    for place in range(len(rows)):
        tables, row = tables_at(rows, place), rows[place]
        if ends[place] - first <= PREFETCHED:
            _prefetch(tables, tokens[first : ends[place]], row)
        num_rows, top_k = shapes[place]
        if num_rows:
            last_answer = first_answer + num_rows * top_k
            best = answers[first_answer:last_answer].reshape(num_rows, top_k)
            own_explore = explore[first_row : first_row + num_rows]
            pool = int32_at(row[POOL], row[POOL_SIZE])
            root = int(tables[3][TAIL + tables[3][TAIL_LEN] - 1])
            completed = advance(pool, row[NGRAM], root, refine(tables[0], best, own_explore))
            _learn_pooled(tables, completed, row, settings[0])
            first_answer, first_row = last_answer, first_row + num_rows
        _extend(tables, tokens[first : ends[place]], row, settings[1])
        first = ends[place]


@compiled
def _prefetch(tables: Tables, tokens: Int32, row: Int64) -> None:
    """Have what a text's next n-grams need read at once: one after the other is most of the time
    that they take.
    """
    forward, backward, continuations, cursor = tables
    text = joined(cursor, tokens)
    for stage in range(3):
        for end in range(len(text) - len(tokens), len(text)):
            for first in range(max(0, end + 1 - row[NGRAM]), end):
                hashed = hash_of(text[first : first + 1])
                if stage == 0:
                    prefetch_slot(forward, hashed)
                    prefetch_slot(backward, hash_of(text[first:end]))
                elif stage == 1:
                    prefetch_entry(forward, hashed)
                    prefetch_entry(backward, hash_of(text[first:end]))
                else:
                    entry = prefetch_entry(forward, hashed)
                    if entry != NONE and forward[0][entry, LAST] != NONE:
                        known = forward[0][entry, LAST]
                        prefetch(
                            continuations.ctypes.data + 4 * continuations.shape[1] * int(known)
                        )


@compiled
def joined(cursor: Int64, tokens: Int32) -> Int32:
    """The last tokens of the text and those that follow."""
    num_before = cursor[TAIL_LEN]
    text = np.empty(num_before + len(tokens), dtype=np.int32)
    text[:num_before] = cursor[TAIL : TAIL + num_before]
    text[num_before:] = tokens
    return text


@compiled
def _learn_pooled(tables: Tables, ngrams: Int32, row: Int64, has_all_starts: int) -> None:
    for ngram in ngrams:
        starts = len(ngram) - 1 if has_all_starts else 1
        for start in range(starts):
            for length in range(row[SHORTEST], len(ngram) - start + 1):
                _learn(tables, ngram[start : start + length], row)


@compiled
def _extend(tables: Tables, tokens: Int32, row: Int64, is_learned: int) -> None:
    """Continue the text, learning every n-gram that ends at a new token."""
    cursor, ngram = tables[3], row[NGRAM]
    text = joined(cursor, tokens)
    num_before = len(text) - len(tokens)
    if is_learned:
        for end in range(num_before + 1, len(text) + 1):
            for length in range(row[SHORTEST], min(end, ngram) + 1):
                _learn(tables, text[end - length : end], row)
    cursor[TAIL_LEN] = min(len(text), ngram)
    cursor[TAIL : TAIL + cursor[TAIL_LEN]] = text[len(text) - cursor[TAIL_LEN] :]


@compiled
def _learn(tables: Tables, ngram: Int32, row: Int64) -> None:
    forward, backward, continuations, cursor = tables
    token, sequence = ngram[:1], ngram[: len(ngram) - 1]
    hashed = hash_of(token)
    entry = find_hashed(forward, token, hashed)
    if entry == NONE:
        if forward[2][COUNT] == row[MAX_KEYS]:
            _free_all(forward[0][drop_oldest(forward)], continuations, cursor)
        entry = add(forward, token, hashed)
        forward[0][entry, HELD] = 0
    else:
        use(forward, entry)
    own, path = forward[0][entry], ngram[1:]
    if row[KEEPS_PREFIXES]:
        known = _same(own, continuations, path)
    else:
        known = _known(own, continuations, cursor, path)
    _continue(own, continuations, cursor, path, row[CAPACITY], known)
    hashed = hash_of(sequence)
    entry = find_hashed(backward, sequence, hashed)
    if entry == NONE:
        if backward[2][COUNT] == row[MAX_KEYS]:
            drop_oldest(backward)
        entry = add(backward, sequence, hashed)
    else:
        use(backward, entry)
    backward[0][entry, backward[0].shape[1] - 1] = ngram[len(ngram) - 1]


@compiled
def _continue(
    entry: Int32, continuations: Int32, cursor: Int64, path: Int32, capacity: int, known: int
) -> None:
    """Make a path the latest continuation of an entry's token, in the place of `known`."""
    if known != NONE:
        if continuations[known, LENGTH] < len(path):
            _write(continuations, known, path)
        if known == entry[LAST]:
            return
        _remove(entry, continuations, known)
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
def _same(entry: Int32, continuations: Int32, path: Int32) -> int:
    """The continuation that is the path itself; NONE where there is none."""
    known = entry[LAST]
    while known != NONE:
        row = continuations[known]
        if row[LENGTH] == len(path) and _shared(row, path) == len(path):
            return known
        known = row[BEFORE]
    return NONE


@compiled
def _known(entry: Int32, continuations: Int32, cursor: Int64, path: Int32) -> int:
    """The continuation that a path takes the place of, or that says it already.

    That is the path without its last token; else the path itself; else the latest that begins with
    it. NONE where there is none. While none of all continuations begins another, the latest that
    has to do with the path is the one.
    """
    if cursor[IS_NESTED]:
        return _known_of_nested(entry, continuations, path)
    begins, known = False, entry[LAST]
    while known != NONE:
        row = continuations[known]
        shared = _shared(row, path)
        is_prefix = shared == len(path) - 1 and row[LENGTH] == shared
        if is_prefix or shared == len(path):
            return known
        begins = begins or shared == row[LENGTH]
        known = row[BEFORE]
    if begins:
        # The path is added, although it goes on from another one.
        cursor[IS_NESTED] = 1
    return NONE


@compiled
def _known_of_nested(entry: Int32, continuations: Int32, path: Int32) -> int:
    """The same where there may be several."""
    prefix, same, longer = NONE, NONE, NONE
    known = entry[LAST]
    while known != NONE:
        row = continuations[known]
        shared = _shared(row, path)
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
def _shared(row: Int32, path: Int32) -> int:
    """How many of its first tokens a continuation shares with a path."""
    shared, most = 0, min(len(path), row[LENGTH])
    while shared < most and row[PATH + shared] == path[shared]:
        shared += 1
    return shared


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
def _free_all(entry: Int32, continuations: Int32, cursor: Int64) -> None:
    """Free all continuations of a token."""
    known = entry[FIRST]
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
def guess_all(
    rows: Int64, max_nodes: Int64, assumed: Int32, assumed_ends: Int64, settings: Int64
) -> tuple[Int32, Int32, Float32, Int64]:
    """Tokens, parents, log-probabilities and ends, as in `ProposalBatch`, of a tree for each text
    and what is assumed to follow it.

    assumed: one text's tokens behind the other's, those of text i up to `assumed_ends[i]`
    settings: int64 [4]  most guesses; most tokens of the backward one, 0 for none; 1 or 0: there
    are forward guesses, these come first
    """
    tokens = np.empty(max_nodes.sum(), dtype=np.int32)
    parents = np.empty(len(tokens), dtype=np.int32)
    ends = np.empty(len(rows), dtype=np.int64)
    first, first_assumed = 0, 0
    for place in range(len(rows)):
        most = max_nodes[place]
        nodes = (tokens[first : first + most], parents[first : first + most])
        tables = tables_at(rows, place)
        text = joined(tables[3], assumed[first_assumed : assumed_ends[place]])
        first += _guess(tables, nodes, text, rows[place, NGRAM], settings)
        ends[place], first_assumed = first, assumed_ends[place]
    return tokens[:first], parents[:first], np.zeros(first, dtype=np.float32), ends


@compiled
def _guess(
    tables: Tables, nodes: tuple[Int32, Int32], text: Int32, ngram: int, settings: Int64
) -> int:
    """`text`: what the guesses go on from, at least its last `ngram` - 1 tokens."""
    count, num_left = 0, settings[MAX_GUESSES]
    last, context = text[len(text) - 1 :], text[max(0, len(text) - ngram + 1) :]
    if settings[FORWARD_FIRST]:
        count, num_left = _add_forward(tables, nodes, last, count, num_left, settings)
    if settings[GUESS_LEN] and num_left:
        guess = _backward_guess(tables[1], context, ngram, settings[GUESS_LEN])
        if len(guess):
            count, num_left = add_path(nodes, count, guess), num_left - 1
    if not settings[FORWARD_FIRST]:
        count, num_left = _add_forward(tables, nodes, last, count, num_left, settings)
    return count


@compiled
def _add_forward(
    tables: Tables,
    nodes: tuple[Int32, Int32],
    last: Int32,
    count: int,
    num_left: int,
    settings: Int64,
) -> tuple[int, int]:
    """Nodes and guesses left after the continuations of the last token, the latest first."""
    forward, _, continuations, _ = tables
    entry = find(forward, last) if settings[HAS_FORWARD] else NONE
    known = NONE if entry == NONE else forward[0][entry, LAST]
    while known != NONE and num_left and count < len(nodes[0]):
        row = continuations[known]
        count = add_path(nodes, count, row[PATH : PATH + row[LENGTH]])
        num_left -= 1
        known = row[BEFORE]
    return count, num_left


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
        text[end] = backward[0][entry, backward[0].shape[1] - 1]
        end += 1
    return text[len(context) : end]
