"""Grows the most probable subtree below a matched context, best first, compiled.

A node is seen through several views: one for every segment and context length. With level 0 the
longest context and level 1 the shorter one that was seen more often, n tokens from the start of a
level's context to the node, and prior = PRIOR / n of that level,

    P_1(token | path) = count_1(path + token) / (count_1(path) + prior_1)
    P(token | path)   = (count_0(path + token) + prior_0 * BACK_OFF * P_1)
                        / (count_0(path) + prior_0)

and P = BACK_OFF * P_1 where level 0 has nothing left. So a level's weight falls with its count, as
in Dirichlet smoothing (MacKay and Peto 1995), and what is missing to 1 stands for "something never
seen here": one occurrence is never taken for certain, and the less so the shorter the match. On
held-out files of the standard library (4.8 M tokens stored) a single occurrence was right 18 % of
the time after 2 matching tokens, 39 % after 5 and 56 % after 8, which is what PRIOR = 8 says.
"""

from __future__ import annotations

import math

import numpy as np

from ..core.compiled import compiled
from ..core.types import ROOT, Float64, Int64
from .segment import MAX_CONTINUATION, SEPARATOR
from .segment_view import common_len, token

PRIOR = 8.0
BACK_OFF = 0.5
# A child's end is looked for one by one among so many suffixes, and by leaps after them.
NEAR = 16
# Columns of a node: its token, its parent, its depth, and the turn in which it was found.
TOKEN, PARENT, DEPTH, TURN = range(4)
# Columns of a view's current child: its token, and its span.
CHILD, LOW, HIGH = range(3)


@compiled
def grow(rows: Int64, lengths: Int64, spans: Int64, budget: int) -> tuple[Int64, Float64]:
    """The `budget` continuations of highest path probability below a context, best first.

    rows     int64 [segments, 6]
    lengths  int64 [levels]  tokens of each level's context
    spans    int64 [levels * segments, 2]  of the contexts, level by level

    Gives int64 [n, 4], nodes in the columns above, and float64 [n], their log-probability given
    their parent.
    """
    nodes, log_probs = np.empty((budget, 4), dtype=np.int64), np.empty(budget)
    # What was found and not taken yet, in no order: the best, as many as may still be taken.
    found, given = np.empty_like(nodes), np.empty(budget)
    costs, found_spans = np.empty(budget), np.empty((budget, len(spans), 2), dtype=np.int64)
    children = np.empty((len(spans), 3), dtype=np.int64)
    own, count, cost = spans.copy(), 0, 0.0
    for turn in range(budget):
        parent = turn - 1 if turn else ROOT
        depth = nodes[parent, DEPTH] if turn else 0
        weights = _weights(lengths, own, depth)
        best = SEPARATOR
        if depth < MAX_CONTINUATION:
            best = _first_child(rows, lengths, own, depth, children)
        while best != SEPARATOR:
            log_prob = math.log(_prob(children, weights, best))
            slot = count
            if count >= budget - turn:
                slot = _worst(found, costs, count)
            if slot == count or cost - log_prob < costs[slot]:
                count = max(count, slot + 1)
                costs[slot], given[slot] = cost - log_prob, log_prob
                row = found[slot]
                row[TOKEN], row[PARENT], row[DEPTH], row[TURN] = best, parent, depth + 1, turn
                _copy_spans(children, best, found_spans[slot])
            best = _next_child(rows, lengths, own, depth, children, best)
        if not count:
            return nodes[:turn], log_probs[:turn]
        slot, count = _best(found, costs, count), count - 1
        nodes[turn], log_probs[turn] = found[slot], given[slot]
        cost, own[:] = costs[slot], found_spans[slot]
        found[slot], found_spans[slot] = found[count], found_spans[count]
        costs[slot], given[slot] = costs[count], given[count]
    return nodes, log_probs


@compiled
def _prob(children: Int64, weights: Float64, best: int) -> float:
    """The probability of the child `best`, given its parent."""
    prob, per_level = 0.0, len(children) // len(weights)
    for view in range(len(children)):
        if children[view, CHILD] == best:
            prob += weights[view // per_level] * (children[view, HIGH] - children[view, LOW])
    return prob


@compiled
def _copy_spans(children: Int64, best: int, spans: Int64) -> None:
    """The spans of the child `best`; empty in views that do not have it."""
    spans[:] = 0
    for view in range(len(children)):
        if children[view, CHILD] == best:
            spans[view] = children[view, LOW:]


@compiled
def _weights(lengths: Int64, own: Int64, depth: int) -> Float64:
    """float64 [levels]: what one occurrence below the node adds to a child's probability."""
    weights, left = np.empty(len(lengths)), 1.0
    per_level = len(own) // len(lengths)
    for level in range(len(lengths)):
        views = own[level * per_level : (level + 1) * per_level]
        count = (views[:, 1] - views[:, 0]).sum()
        prior = PRIOR / (lengths[level] + depth)
        weights[level] = left / (count + prior)
        left *= BACK_OFF * (prior / (count + prior) if count else 1.0)
    return weights


@compiled
def _first_child(rows: Int64, lengths: Int64, own: Int64, depth: int, children: Int64) -> int:
    """Begin with the children of a node: set each view's current one, and give the lowest token."""
    for view in range(len(own)):
        children[view, HIGH] = own[view, 0]
    children[:, CHILD] = ROOT
    return _next_child(rows, lengths, own, depth, children, ROOT)


@compiled
def _next_child(  # noqa: PLR0917 - flat arrays, as in all compiled loops
    rows: Int64, lengths: Int64, own: Int64, depth: int, children: Int64, passed: int
) -> int:
    """Move the views whose current child is `passed` on, and give the lowest token of all.

    SEPARATOR, which is above all tokens: there is no child any more.
    """
    lowest = SEPARATOR
    for view in range(len(own)):
        if children[view, CHILD] == passed:
            low, high = children[view, HIGH], own[view, 1]
            if low < high:
                row = rows[view % len(rows)]
                at = lengths[view // len(rows)] + depth
                children[view, CHILD], children[view, LOW] = token(row, low, at), low
                children[view, HIGH] = _child_end(row, low, high, at)
            else:
                children[view, CHILD] = SEPARATOR
        lowest = min(lowest, children[view, CHILD])
    return lowest


@compiled
def _child_end(row: Int64, low: int, high: int, at: int) -> int:
    """Where the suffixes end that share their token `at` with the one at `low`."""
    near = min(high, low + NEAR)
    for place in range(low + 1, near):
        if common_len(row, place) == at:
            return place
    own, inside, step = token(row, low, at), near - 1, NEAR
    while inside + step < high and token(row, inside + step, at) == own:
        inside += step
        step *= 2
    low, high = inside + 1, min(high, inside + step)
    while low < high:
        middle = (low + high) // 2
        if token(row, middle, at) == own:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _is_better(nodes: Int64, costs: Float64, one: int, other: int) -> bool:
    """Cheaper; of equal ones the one found first, and of those found together the lower token."""
    if costs[one] != costs[other]:
        return costs[one] < costs[other]
    if nodes[one, TURN] != nodes[other, TURN]:
        return nodes[one, TURN] < nodes[other, TURN]
    return nodes[one, TOKEN] < nodes[other, TOKEN]


@compiled
def _best(nodes: Int64, costs: Float64, count: int) -> int:
    best = 0
    for slot in range(1, count):
        if _is_better(nodes, costs, slot, best):
            best = slot
    return best


@compiled
def _worst(nodes: Int64, costs: Float64, count: int) -> int:
    worst = 0
    for slot in range(1, count):
        if _is_better(nodes, costs, worst, slot):
            worst = slot
    return worst
