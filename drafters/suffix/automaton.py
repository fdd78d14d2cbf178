"""The compiled loops over a suffix automaton; `drafters/suffix/counts.py` uses them.

Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text". A state stands for
the strings that end at the same places, an edge for one more token at their end. It is a suffix
tree's counts in a few bytes a token, and a token is appended in constant time.

An automaton is four arrays:
states  int32 [states, 6]  LENGTH of the longest string; LINK, the state of the longest suffix that
                           ends at more places; COUNT of places; LAST_END, the latest of them;
                           FIRST_EDGE; BEST_EDGE to the largest count, of equal ones the latest
edges   int32 [edges, 4]   SOURCE and TARGET state, TOKEN, and the source's NEXT_EDGE
table   int32 [slots]      edges by a hash of source and token, NONE where free; a power of two
cursor  int64 [6]          NUM_STATES, NUM_EDGES, NUM_TOKENS; LAST, the state of the text so far;
                           CONTEXT, that of its last CONTEXT_LEN tokens

Where one call works on several of them, each is a row: their addresses, and the tokens that they
have room for.
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Int32, Int64
from ...core.compiled import address_of, compiled, int32_at, int32_rows_at, int64_at

Automaton = tuple[Int32, Int32, Int32, Int64]

NONE = -1
ROOT_STATE = 0
LENGTH, LINK, COUNT, LAST_END, FIRST_EDGE, BEST_EDGE = range(6)
SOURCE, TOKEN, TARGET, NEXT_EDGE = range(4)
NUM_STATES, NUM_EDGES, NUM_TOKENS, LAST, CONTEXT, CONTEXT_LEN = range(6)
# Odd, and so large that neighbouring states and tokens fall far apart.
STATE_FACTOR = 0x1E3779B97F4A7C15
TOKEN_FACTOR = 0x3F58476D1CE4E5B9


def empty_automaton(capacity: int) -> Automaton:
    """An automaton of no text, with room for `capacity` tokens, which is a power of two."""
    # n tokens never take more than 2n states with the root and 3n edges.
    states = np.empty((2 * capacity + 1, 6), dtype=np.int32)
    states[ROOT_STATE] = (0, NONE, 0, NONE, NONE, NONE)
    edges = np.empty((3 * capacity, 4), dtype=np.int32)
    table = np.full(4 * capacity, NONE, dtype=np.int32)
    return states, edges, table, np.array([1, 0, 0, ROOT_STATE, ROOT_STATE, 0], dtype=np.int64)


def row_of(automaton: Automaton) -> tuple[int, ...]:
    """The automaton as a row; the row's owner must keep the arrays alive."""
    return (*map(address_of, automaton), len(automaton[2]) // 4)


# Numbers of a row.
ROW_LEN = 5


@compiled
def automaton_at(row: Int64) -> Automaton:
    """The arrays that a row names."""
    capacity = row[4]
    return (
        int32_rows_at(row[0], 2 * capacity + 1, 6),
        int32_rows_at(row[1], 3 * capacity, 4),
        int32_at(row[2], 4 * capacity),
        int64_at(row[3], 6),
    )


@compiled
def extend_all(rows: Int64, tokens: Int32, spans: Int64, max_depth: int) -> None:
    """`extend` for the automaton of each row, by `tokens[spans[row, 0] : spans[row, 1]]`."""
    for place in range(len(rows)):
        own = tokens[spans[place, 0] : spans[place, 1]]
        extend(automaton_at(rows[place]), own, max_depth)


@compiled
def find_edge(automaton: Automaton, state: int, token: int) -> int:
    """The edge of `state` with `token`, or NONE."""
    _, edges, table, _ = automaton
    slot = _first_slot(state, token, len(table))
    edge = table[slot]
    while edge != NONE and (edges[edge, SOURCE] != state or edges[edge, TOKEN] != token):
        slot = (slot + 1) & (len(table) - 1)
        edge = table[slot]
    return edge


@compiled
def suffix_state(states: Int32, state: int, length: int) -> int:
    """The state of the last `length` tokens of the strings of `state`."""
    while state != ROOT_STATE and states[states[state, LINK], LENGTH] >= length:
        state = states[state, LINK]
    return state


@compiled
def advanced(
    automaton: Automaton, state: int, length: int, tokens: Int32, most: int
) -> tuple[int, int]:
    """State and length of the longest suffix that was counted of a string and these tokens.

    `state` is that of the string's last `length` tokens; no more than `most` are looked at.
    """
    states, edges, _, _ = automaton
    for token in tokens:
        edge = find_edge(automaton, state, token)
        while edge == NONE and state != ROOT_STATE:
            state = states[state, LINK]
            length = states[state, LENGTH]
            edge = find_edge(automaton, state, token)
        if edge != NONE:
            length = min(length + 1, most)
            state = suffix_state(states, edges[edge, TARGET], length)
    return state, length


@compiled
def extend(automaton: Automaton, tokens: Int32, max_depth: int) -> None:
    """Append tokens to the text; counts are kept for strings of at most `max_depth` tokens.

    Needs room for them in the arrays.
    """
    cursor = automaton[3]
    for token in tokens:
        cursor[LAST] = _append(automaton, cursor[LAST], token)
        _count(automaton, token, max_depth)
        cursor[NUM_TOKENS] += 1


@compiled
def fill_table(edges: Int32, num_edges: int, table: Int32) -> None:
    """Enter all edges in an empty table."""
    for edge in range(num_edges):
        _enter(edges, table, edge)


@compiled
def _append(automaton: Automaton, last: int, token: int) -> int:
    """The state of the text with a token more, its suffixes all linked."""
    states = automaton[0]
    edge = find_edge(automaton, last, token)
    if edge != NONE:
        # An earlier text of the same automaton began alike.
        return _split(automaton, last, edge)
    new = _add_state(automaton, states[last, LENGTH] + 1)
    state = last
    while state != NONE:
        edge = find_edge(automaton, state, token)
        if edge != NONE:
            states[new, LINK] = _split(automaton, state, edge)
            return new
        _add_edge(automaton, state, token, new)
        state = states[state, LINK]
    states[new, LINK] = ROOT_STATE
    return new


@compiled
def _split(automaton: Automaton, state: int, edge: int) -> int:
    """The state of the longest string of `state` with the edge's token.

    Where longer strings were in it too, they no longer end at the same places: it is split.
    """
    states, edges, _, _ = automaton
    target, token = edges[edge, TARGET], edges[edge, TOKEN]
    if states[target, LENGTH] == states[state, LENGTH] + 1:
        return target
    split = _add_state(automaton, states[state, LENGTH] + 1)
    for column in (LINK, COUNT, LAST_END):
        states[split, column] = states[target, column]
    states[target, LINK] = split
    copied = states[target, FIRST_EDGE]
    while copied != NONE:
        added = _add_edge(automaton, split, edges[copied, TOKEN], edges[copied, TARGET])
        if copied == states[target, BEST_EDGE]:
            states[split, BEST_EDGE] = added
        copied = edges[copied, NEXT_EDGE]
    while edge != NONE and edges[edge, TARGET] == target:
        edges[edge, TARGET] = split
        state = states[state, LINK]
        edge = NONE if state == NONE else find_edge(automaton, state, token)
    return split


@compiled
def _count(automaton: Automaton, token: int, max_depth: int) -> None:
    """Count the strings that end at the new token, and move the context to it."""
    states, edges, _, cursor = automaton
    # The state of the context may have been split.
    state = suffix_state(states, cursor[CONTEXT], cursor[CONTEXT_LEN])
    longest, counted = NONE, NONE
    while state != NONE:
        edge = find_edge(automaton, state, token)
        target = edges[edge, TARGET]
        if longest == NONE:
            longest = target
        if target != counted:
            counted = target
            states[target, COUNT] += 1
            states[target, LAST_END] = cursor[NUM_TOKENS]
        best = states[state, BEST_EDGE]
        if best == NONE or states[edges[best, TARGET], COUNT] <= states[target, COUNT]:
            states[state, BEST_EDGE] = edge
        state = states[state, LINK]
    cursor[CONTEXT_LEN] = min(cursor[CONTEXT_LEN] + 1, max_depth - 1)
    cursor[CONTEXT] = suffix_state(states, longest, cursor[CONTEXT_LEN])


@compiled
def _add_state(automaton: Automaton, length: int) -> int:
    states, _, _, cursor = automaton
    state = cursor[NUM_STATES]
    cursor[NUM_STATES] += 1
    states[state, LENGTH] = length
    states[state, COUNT] = 0
    states[state, LAST_END] = states[state, FIRST_EDGE] = states[state, BEST_EDGE] = NONE
    return state


@compiled
def _add_edge(automaton: Automaton, source: int, token: int, target: int) -> int:
    states, edges, table, cursor = automaton
    edge = cursor[NUM_EDGES]
    cursor[NUM_EDGES] += 1
    edges[edge, SOURCE], edges[edge, TOKEN], edges[edge, TARGET] = source, token, target
    edges[edge, NEXT_EDGE] = states[source, FIRST_EDGE]
    states[source, FIRST_EDGE] = edge
    _enter(edges, table, edge)
    return edge


@compiled
def _enter(edges: Int32, table: Int32, edge: int) -> None:
    slot = _first_slot(edges[edge, SOURCE], edges[edge, TOKEN], len(table))
    while table[slot] != NONE:
        slot = (slot + 1) & (len(table) - 1)
    table[slot] = edge


@compiled
def _first_slot(state: int, token: int, num_slots: int) -> int:
    mixed = np.int64(state) * STATE_FACTOR ^ np.int64(token) * TOKEN_FACTOR
    return int(mixed >> 29) & (num_slots - 1)
