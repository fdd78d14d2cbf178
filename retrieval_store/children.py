"""Walks the children of a trie node that several views see, in order of their tokens, compiled.

A view is a span of a segment's sorted suffixes that share their first `at` tokens; a node seen by
several is walked in step, so that a child's spans in all of them are at hand together.
"""

from __future__ import annotations

from ..core.compiled import compiled
from ..core.types import ROOT, Float64, Int64
from .segment import SEPARATOR
from .segment_view import common_len, token, wide_child, wide_node
from .wide_nodes import CHILD_HIGH, CHILD_LOW, CHILD_NODE, CHILD_TOKEN, FIRST, SHARED

# Columns of a view's current child: its token, its span, its row in the table of wide nodes or -1,
# and where the walk goes on: a row of the table's children, or for a path of one child, 1.
CHILD, LOW, HIGH, NODE, NEXT = range(5)
NUM_COLUMNS = 5


@compiled
def rewind(own: Int64, children: Int64) -> None:
    """Begin with the children of a node whose views, int64 [views, 3], are spans and wide rows."""
    for view in range(len(own)):
        children[view, HIGH] = own[view, 0]
        children[view, CHILD] = ROOT
        children[view, NEXT] = 0


@compiled
def next_child(  # noqa: PLR0917 - flat arrays, as in all compiled loops
    rows: Int64, depths: Int64, own: Int64, least: Float64, children: Int64, passed: int
) -> int:
    """Move the views whose current child is `passed` on, and give the lowest token of all.

    depths  int64 [levels]  of the node, in each level
    least   float64 [views]  children that occur less often in a view are left out there

    SEPARATOR, which is above all tokens: there is no child any more.
    """
    lowest, view = SEPARATOR, 0
    for at in depths:
        for row in rows:
            if children[view, CHILD] == passed:
                _next_of_view(row, own[view], at, least[view], children[view])
            lowest = min(lowest, children[view, CHILD])
            view += 1
    return lowest


@compiled
def _next_of_view(row: Int64, own: Int64, at: int, least: float, child: Int64) -> None:
    if own[0] == own[1]:
        child[CHILD] = SEPARATOR
    elif own[2] < 0:
        _next_narrow(row, own, at, least, child)
    elif at < wide_node(row, own[2], SHARED):
        _only_child(row, own, at, child)
    else:
        _next_wide(row, own, least, child)


@compiled
def _next_narrow(row: Int64, own: Int64, at: int, least: float, child: Int64) -> None:
    """Children end where suffixes share no more than the node's tokens."""
    low, child[CHILD] = child[HIGH], SEPARATOR
    while low < own[1]:
        end = low + 1
        while end < own[1] and common_len(row, end) > at:
            end += 1
        if end - low >= least:
            child[CHILD], child[LOW], child[HIGH], child[NODE] = token(row, low, at), low, end, -1
            return
        low = end


@compiled
def _only_child(row: Int64, own: Int64, at: int, child: Int64) -> None:
    child[CHILD] = token(row, own[0], at) if child[NEXT] == 0 else SEPARATOR
    child[LOW], child[HIGH], child[NODE], child[NEXT] = own[0], own[1], own[2], 1


@compiled
def _next_wide(row: Int64, own: Int64, least: float, child: Int64) -> None:
    index, child[CHILD] = max(child[NEXT], wide_node(row, own[2], FIRST)), SEPARATOR
    end = wide_node(row, own[2] + 1, FIRST)
    while index < end:
        low, high = wide_child(row, index, CHILD_LOW), wide_child(row, index, CHILD_HIGH)
        if high - low >= least:
            child[CHILD], child[LOW], child[HIGH] = wide_child(row, index, CHILD_TOKEN), low, high
            child[NODE] = wide_child(row, index, CHILD_NODE) - 1
            child[NEXT] = index + 1
            return
        index += 1
