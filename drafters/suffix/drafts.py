"""Drafts from the counts of a suffix automaton, as suffix decoding makes them, compiled."""

from __future__ import annotations

import math

import numpy as np

from ...core.arrays import ROOT, Float32, Float64, Int32, Int64
from ...core.compiled import compiled, int32_at
from .automaton import (
    BEST_EDGE,
    CONTEXT,
    CONTEXT_LEN,
    COUNT,
    FIRST_EDGE,
    LAST_END,
    LENGTH,
    LINK,
    NEXT_EDGE,
    NONE,
    ROOT_STATE,
    ROW_LEN,
    SOURCE,
    TARGET,
    TOKEN,
    Automaton,
    advanced,
    automaton_at,
    suffix_state,
)

# What limits a draft: factor, offset, least path probability, and whether it is a tree.
Limits = tuple[float, float, float, bool]

# A product such as 3 * 0.3333 that falls short of a whole number by rounding alone.
ROUNDING = 1e-6
FIRST_WINDOW = 8


@compiled
def draft_all(rows: Int64, rooms: Int64, limits: Limits) -> tuple[Int32, Int32, Float32, Int64]:
    """Tokens, parents, log-probabilities and ends, as in `ProposalBatch`, of the best drafts.

    rows   int64 [requests, 2 * ROW_LEN + 3]  the automata of the text and of other texts; the
           address of the last tokens to go on from, and how many; how many of these are assumed
           to follow the text
    rooms  int64 [requests]  most nodes of each
    """
    tokens = np.empty(rooms.sum(), dtype=np.int32)
    parents = np.empty(len(tokens), dtype=np.int32)
    log_probs = np.empty(len(tokens), dtype=np.float32)
    ends = np.empty(len(rows), dtype=np.int64)
    first = 0
    for place in range(len(rows)):
        row = rows[place]
        if rooms[place]:
            context = int32_at(row[2 * ROW_LEN], row[2 * ROW_LEN + 1])
            text, answers = automaton_at(row), automaton_at(row[ROW_LEN:])
            num_assumed = row[2 * ROW_LEN + 2]
            draft = best_draft(text, answers, context, num_assumed, rooms[place], limits)
            end = first + len(draft[0])
            tokens[first:end], parents[first:end], log_probs[first:end] = draft
            first = end
        ends[place] = first
    return tokens[:first], parents[:first], log_probs[:first], ends


@compiled
def best_draft(
    text: Automaton,
    answers: Automaton,
    context: Int32,
    num_assumed: int,
    num_tokens: int,
    limits: Limits,
) -> tuple[Int32, Int32, Float32]:
    """Tokens, parents and log-probabilities, as in `Proposal`, of the draft of highest score.

    text     counts of the text that `context`, its last tokens, ends; behind these come the last
             `num_assumed` of `context`, which are not counted
    answers  counts of other texts; `text` wins where scores are equal

    Every suffix of `context` that was counted has a draft; of equal scores the longest one's wins.
    A suffix of m tokens is continued by at most min(num_tokens, factor * m + offset) nodes: by
    the most frequent token after each other or, in a tree, by the nodes of the highest path
    probability. A node's probability is its count by that of the node before it. The score is
    the sum of path probabilities: the tokens that a target that draws from the counts accepts.
    """
    factor, offset, min_prob, is_tree = limits
    # One of the two is the best so far, the other one is tried. Tokens, parents and latest ends.
    nodes = np.empty((2, 3, num_tokens), dtype=np.int32)
    log_probs = np.empty((2, num_tokens), dtype=np.float32)
    kept, count, score = 0, 0, 0.0
    matches = (_end_of_text(text, context, num_assumed), _longest_match(answers, context))
    # The end of the text is one of the places of its suffixes, which nothing follows yet. So it is
    # for what is assumed, though it is not counted.
    num_ends = min(num_assumed, 1)
    for automaton, match, added in ((text, matches[0], num_ends), (answers, matches[1], 0)):
        state, length = match
        # Suffixes of one state have equal counts, so the longest of them has the best draft.
        while state != ROOT_STATE:
            room = min(num_tokens, math.floor(factor * length + offset + ROUNDING))
            if room <= score:
                # No probability is above 1: neither this nor a shorter suffix scores higher.
                break
            other = 1 - kept
            draft = (nodes[other], log_probs[other])
            own = (state, automaton[0][state, COUNT] + added)
            other_count, other_score = _grow(automaton, own, room, (min_prob, is_tree), draft)
            if other_score > score:
                kept, count, score = other, other_count, other_score
            state = automaton[0][state, LINK]
            length = automaton[0][state, LENGTH]
    return nodes[kept, 0, :count], nodes[kept, 1, :count], log_probs[kept, :count]


@compiled
def _end_of_text(automaton: Automaton, context: Int32, num_assumed: int) -> tuple[int, int]:
    """State and length of the longest suffix of `context` that was counted, of which all but the
    last `num_assumed` tokens end the text."""
    states, _, _, cursor = automaton
    num_before = len(context) - num_assumed
    length = min(cursor[CONTEXT_LEN], num_before)
    state = suffix_state(states, cursor[CONTEXT], length)
    return advanced(automaton, state, length, context[num_before:], len(context))


@compiled
def _longest_match(automaton: Automaton, context: Int32) -> tuple[int, int]:
    """State and length of the longest suffix of `context` that was counted."""
    window = FIRST_WINDOW
    while True:
        state, length = advanced(automaton, ROOT_STATE, 0, context[-window:], window)
        # Most matches are short; only one of the whole window may go on to the left of it.
        if length < window or window >= len(context):
            return state, length
        window *= 4


@compiled
def _grow(
    automaton: Automaton,
    first: tuple[int, int],
    room: int,
    limits: tuple[float, bool],
    draft: tuple[Int32, Float32],
) -> tuple[int, float]:
    """Write the draft below one state, given with its count; its nodes and its score."""
    states, edges, _, _ = automaton
    min_prob, is_tree = limits
    state, total = first
    nodes, log_probs = draft
    # Of each node and, behind them, of those that wait for their turn: the best first.
    path_probs = np.empty(room, dtype=np.float64)
    count, end, score = 0, 0, 0.0
    parent, path_prob = ROOT, 1.0
    while count < room:
        has_siblings = is_tree and count + 1 < room
        edge = states[state, FIRST_EDGE] if has_siblings else states[state, BEST_EDGE]
        while edge != NONE:
            target = edges[edge, TARGET]
            prob = path_prob * (states[target, COUNT] / total)
            if prob >= min_prob:
                node = (edge, parent, states[target, LAST_END], prob)
                end = _wait(nodes, path_probs, count, end, node)
            edge = edges[edge, NEXT_EDGE] if has_siblings else NONE
        if end == count:
            break
        edge = nodes[0, count]
        source, state = edges[edge, SOURCE], edges[edge, TARGET]
        nodes[0, count] = edges[edge, TOKEN]
        above = first[1] if nodes[1, count] == ROOT else states[source, COUNT]
        total = states[state, COUNT]
        log_probs[count] = math.log(total / above)
        parent, path_prob = count, path_probs[count]
        score += path_prob
        count += 1
    return count, score


@compiled
def _wait(
    nodes: Int32, path_probs: Float64, first: int, end: int, node: tuple[int, int, int, float]
) -> int:
    """Put a node in its place among those from `first` to `end`; the new end.

    They fall in path probability; of equal ones that come first which stand latest in the texts.
    What has no place is forgotten: there is no room for it in the draft.
    """
    edge, parent, last_end, prob = node
    room = len(path_probs)
    place = end
    while place > first:
        before = path_probs[place - 1]
        if before > prob or (before == prob and nodes[2, place - 1] >= last_end):
            break
        if place < room:
            path_probs[place] = before
            for column in range(3):
                nodes[column, place] = nodes[column, place - 1]
        place -= 1
    if place < room:
        path_probs[place] = prob
        nodes[0, place], nodes[1, place], nodes[2, place] = edge, parent, last_end
    return min(end + 1, room)
