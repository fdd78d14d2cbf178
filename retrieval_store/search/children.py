"""Walks the children of a trie node that several views see, in order of their tokens, compiled.

A view is a span of a segment's sorted suffixes that share their first `at` tokens; the views of a
node advance together, so that a child's spans in all of them are available at once.
"""

from __future__ import annotations

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
