"""Grows the most probable subtree below a matched context, best first, compiled.

A node has several views: one for every segment and context length, each a span of a segment's
sorted suffixes that share their first `at` tokens. The views of a node advance together, so that a
child's spans in all of them are available at once. Level 0 is the longest context, level 1 the
shorter one that occurs more often. With n tokens from the start of a level's context to the node,
and prior = PRIOR / n of that level,

    P_1(token | path) = count_1(path + token) / (count_1(path) + prior_1)
    P(token | path)   = (count_0(path + token) + prior_0 * BACK_OFF * P_1)
                        / (count_0(path) + prior_0)

and P = BACK_OFF * P_1 where level 0 has no occurrence. So the weight of the prior falls with a
level's count, as in Dirichlet smoothing (MacKay and Peto 1995). The missing mass stands for unseen
tokens: one occurrence is never certain, and less so after a shorter match. On held-out files of the
standard library (4.8 M tokens stored) a single occurrence was right 18 % of the time after 2
matching tokens, 39 % after 5 and 56 % after 8. PRIOR = 8 fits these figures.

Counts of children are exact below nodes of fewer than `WIDE` suffixes in a segment. Below wider
nodes, they are exact for children that make up at least 1 / `MOST_CHILDREN` of the node. Rarer ones
count as absent (`retrieval_store/segment/wide_nodes.py`), so that no node costs more than `WIDE`
steps. See docs/retrieval.md, "Lookups".
"""

from __future__ import annotations

import math

import numpy as np

from ...core.arrays import ROOT, Float64, Int64
from ...core.compiled import compiled
from ..segment.segment import SEPARATOR
from ..segment.view import common_len, token, wide_child, wide_node
from ..segment.wide_nodes import CHILD_HIGH, CHILD_LOW, CHILD_NODE, CHILD_TOKEN, FIRST, SHARED

# Columns of a view's current child: its token, its span, its row in the table of wide nodes or -1,
# and the next position of the walk. That is a row of the table's children, or 1 for a path of one
# child.
CHILD, LOW, HIGH, NODE, NEXT = range(5)
NUM_COLUMNS = 5
PRIOR = 8.0
BACK_OFF = 0.5
# Columns of a node: its token, its parent, and its depth.
TOKEN, PARENT, DEPTH = range(3)
# Tolerance: pruned nodes are less probable by more than the rounding error.
MARGIN = 1 - 1e-9


@compiled
def rewind(spans: Int64, children: Int64) -> None:
    """Begin with the children of a node whose views, int64 [views, 3], are spans and wide rows."""
    for view in range(len(spans)):
        children[view, HIGH] = spans[view, 0]
        children[view, CHILD] = ROOT
        children[view, NEXT] = 0


@compiled
def next_child(
    rows: Int64, lengths: Int64, depth: int, spans: Int64, least: Float64, children: Int64,
    passed: int,
) -> int:  # fmt: skip
    """Advance the views whose current child is `passed`; returns the lowest token of all views.

    lengths  int64 [levels]  of each level's context
    depth    of the node below the contexts
    least    float64 [views] children that occur less often in a view are skipped there

    Returns SEPARATOR, which is above all tokens, when no child is left.
    """
    lowest, view = SEPARATOR, 0
    for level in range(len(lengths)):
        for index in range(len(rows)):
            if children[view, CHILD] == passed:
                at = lengths[level] + depth
                _next_of_view(rows, index, spans, view, at, least[view], children)
            lowest = min(lowest, children[view, CHILD])
            view += 1
    return lowest


@compiled
def _next_of_view(
    rows: Int64, index: int, spans: Int64, view: int, at: int, least: float, children: Int64
) -> None:
    if spans[view, 0] == spans[view, 1]:
        children[view, CHILD] = SEPARATOR
    elif spans[view, 2] < 0:
        _next_narrow(rows, index, spans, view, at, least, children)
    elif at < wide_node(rows, index, spans[view, 2], SHARED):
        _only_child(rows, index, spans, view, at, children)
    else:
        _next_wide(rows, index, spans, view, least, children)


@compiled
def _next_narrow(
    rows: Int64, index: int, spans: Int64, view: int, at: int, least: float, children: Int64
) -> None:
    """Children end where suffixes share no more than the node's tokens."""
    low, last = children[view, HIGH], spans[view, 1]
    while low < last:
        end = low + 1
        while end < last and common_len(rows, index, end) > at:
            end += 1
        if end - low >= least:
            children[view, CHILD] = token(rows, index, low, at)
            children[view, LOW], children[view, HIGH], children[view, NODE] = low, end, -1
            return
        low = end
    children[view, CHILD] = SEPARATOR


@compiled
def _only_child(rows: Int64, index: int, spans: Int64, view: int, at: int, children: Int64) -> None:
    is_first = children[view, NEXT] == 0
    children[view, CHILD] = token(rows, index, spans[view, 0], at) if is_first else SEPARATOR
    for column in range(3):
        children[view, LOW + column] = spans[view, column]
    children[view, NEXT] = 1


@compiled
def _next_wide(
    rows: Int64, index: int, spans: Int64, view: int, least: float, children: Int64
) -> None:
    node = spans[view, 2]
    child = max(children[view, NEXT], wide_node(rows, index, node, FIRST))
    end = wide_node(rows, index, node + 1, FIRST)
    while child < end:
        low = wide_child(rows, index, child, CHILD_LOW)
        high = wide_child(rows, index, child, CHILD_HIGH)
        if high - low >= least:
            children[view, CHILD] = wide_child(rows, index, child, CHILD_TOKEN)
            children[view, LOW], children[view, HIGH] = low, high
            children[view, NODE] = wide_child(rows, index, child, CHILD_NODE) - 1
            children[view, NEXT] = child + 1
            return
        child += 1
    children[view, CHILD] = SEPARATOR


@compiled
def grow(
    rows: Int64, lengths: Int64, spans: Int64, budget: int, max_depth: int, prior: float
) -> tuple[Int64, Float64]:
    """The `budget` continuations of highest path probability below a context, best first.

    rows     int64 [segments, 9]
    lengths  int64 [levels]  tokens of each level's context
    spans    int64 [levels * segments, 3]  of the contexts, level by level, each with its row in
             the segment's table of wide nodes or -1
    prior    PRIOR; 0: P_0 alone, by its counts

    Gives int64 [n, 3], nodes in the columns above, and float64 [n], their log-probability given
    their parent.
    """
    nodes, log_probs = np.empty((budget, 3), dtype=np.int64), np.empty(budget)
    # Candidates for the next node: the best ones, as many as the budget still allows. `order` has
    # their slots first, the worst at the front, and then the free slots.
    queued, queued_log_probs = np.empty_like(nodes), np.empty(budget)
    costs, queued_spans = np.empty(budget), np.empty((budget, len(spans), 3), dtype=np.int64)
    order, count = np.arange(budget), 0
    children, least = np.empty((len(spans), NUM_COLUMNS), dtype=np.int64), np.empty(len(spans))
    node_spans, weights = spans.copy(), np.empty(len(spans))
    cost, parent, depth = 0.0, ROOT, 0
    for turn in range(budget):
        best, room = SEPARATOR, budget - turn
        if depth < max_depth:
            _set_weights(lengths, depth, node_spans, weights, prior)
            needed = math.exp(cost - costs[order[0]]) * MARGIN if count == room else 0.0
            if _set_least(weights, node_spans, needed, least):
                rewind(node_spans, children)
                best = next_child(rows, lengths, depth, node_spans, least, children, ROOT)
        while best != SEPARATOR:
            log_prob = math.log(_prob(children, weights, best))
            if count < room or cost - log_prob < costs[order[0]]:
                slot = _enter(order, costs, count, count == room, cost - log_prob)
                count = min(count + 1, room)
                queued[slot, TOKEN], queued[slot, PARENT] = best, parent
                queued[slot, DEPTH], queued_log_probs[slot] = depth + 1, log_prob
                _copy_spans(children, best, queued_spans, slot)
            best = next_child(rows, lengths, depth, node_spans, least, children, best)
        if not count:
            return nodes[:turn], log_probs[:turn]
        count -= 1
        slot, parent = order[count], turn
        depth, cost = queued[slot, DEPTH], float(costs[slot])
        nodes[turn, TOKEN], nodes[turn, PARENT] = queued[slot, TOKEN], queued[slot, PARENT]
        nodes[turn, DEPTH], log_probs[turn] = depth, queued_log_probs[slot]
        _take_spans(queued_spans, slot, node_spans)
    return nodes, log_probs


@compiled
def _enter(order: Int64, costs: Float64, count: int, full: bool, cost: float) -> int:
    """Insert a candidate of this cost in `order`, which has `count` slots; returns its slot.

    It replaces the worst if `full`. Of equal costs the earlier one is better; among children found
    together that is the lower token.
    """
    if full:
        slot, rank = order[0], 0
        while rank + 1 < count and costs[order[rank + 1]] > cost:
            order[rank] = order[rank + 1]
            rank += 1
    else:
        slot, rank = order[count], count
        while rank > 0 and costs[order[rank - 1]] <= cost:
            order[rank] = order[rank - 1]
            rank -= 1
    order[rank], costs[slot] = slot, cost
    return int(slot)


@compiled
def _prob(children: Int64, weights: Float64, best: int) -> float:
    """The probability of the child `best`, given its parent."""
    prob = 0.0
    for view in range(len(children)):
        if children[view, CHILD] == best:
            prob += weights[view] * (children[view, HIGH] - children[view, LOW])
    return prob


@compiled
def _copy_spans(children: Int64, best: int, spans: Int64, slot: int) -> None:
    """Set in `spans` those of the child `best`; empty in views that do not have it."""
    for view in range(len(children)):
        is_there = children[view, CHILD] == best
        spans[slot, view, 0] = children[view, LOW] if is_there else 0
        spans[slot, view, 1] = children[view, HIGH] if is_there else 0
        spans[slot, view, 2] = children[view, NODE] if is_there else 0


@compiled
def _take_spans(spans: Int64, slot: int, node_spans: Int64) -> None:
    for view in range(len(node_spans)):
        for column in range(3):
            node_spans[view, column] = spans[slot, view, column]


@compiled
def _set_weights(lengths: Int64, depth: int, spans: Int64, weights: Float64, prior: float) -> None:
    """Set in `weights`, float64 [views], what one occurrence adds to a child's probability."""
    left, per_level = 1.0, len(spans) // len(lengths)
    for level in range(len(lengths)):
        first, count = level * per_level, 0
        for view in range(first, first + per_level):
            count += spans[view, 1] - spans[view, 0]
        unseen = prior / (lengths[level] + depth)
        for view in range(first, first + per_level):
            weights[view] = left / (count + unseen)
        left *= BACK_OFF * (unseen / (count + unseen) if count else 1.0)


@compiled
def _set_least(weights: Float64, spans: Int64, needed: float, least: Float64) -> bool:
    """Set in `least` how often a child must occur in each view to be considered.

    With fewer occurrences, a child is less probable than `needed` even if it had all suffixes of
    the other views. False if no child can be probable enough.
    """
    whole = 0.0
    for view in range(len(spans)):
        whole += weights[view] * (spans[view, 1] - spans[view, 0])
    for view in range(len(spans)):
        others = whole - weights[view] * (spans[view, 1] - spans[view, 0])
        least[view] = (needed - others) / weights[view]
    return whole >= needed
