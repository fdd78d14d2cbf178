"""A table of the trie's wide nodes and their frequent children, so that no lookup scans them.

A node with many suffixes has children at unknown places in a long span. The table, built once,
makes such a node as fast as any other. It holds the nodes of at least `WIDE` suffixes, and the
children that make up at least 1 / `MOST_CHILDREN` of their node. Lookups do not find the rarer
ones. Nodes on a path without a branch share a span, and so an entry (as in the LCP-interval tree of
Abouelhoda, Kurtz and Ohlebusch 2004).
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Int64
from ...core.compiled import compiled
from .suffix_array import Uint8, Uint32

WIDE = 64
MOST_CHILDREN = 64
# Columns of a node: its span, how many tokens all its suffixes share, and its first child. The
# children end where the next node's begin; the last row only marks the end.
LOW, HIGH, SHARED, FIRST = range(4)
# Columns of a child: its token, its span, and its own row among the nodes plus 1; 0: not wide.
CHILD_TOKEN, CHILD_LOW, CHILD_HIGH, CHILD_NODE = range(4)


def wide_nodes(text: Uint32, suffixes: Uint32, common_lens: Uint8) -> tuple[Uint32, Uint32]:
    """The table for sorted suffixes: nodes uint32 [m + 1, 4] by span, children uint32 [k, 4].

    `text`, uint32 [n], has the largest uint32 between documents, which never becomes a child.
    """
    count = _spans(common_lens, np.empty((0, 4), dtype=np.int64))
    nodes = np.zeros((count, 4), dtype=np.int64)
    _spans(common_lens, nodes)
    nodes = nodes[np.lexsort((nodes[:, HIGH], nodes[:, LOW]))]
    end = np.array([[0, 0, 0, _children(text, suffixes, common_lens, nodes, nodes[:0])]])
    children = np.zeros((int(end[0, FIRST]), 4), dtype=np.int64)
    _children(text, suffixes, common_lens, nodes, children)
    _link(nodes, children)
    return np.concatenate([nodes, end]).astype("<u4"), children.astype("<u4")


def _link(nodes: Int64, children: Int64) -> None:
    wide = np.flatnonzero(children[:, CHILD_HIGH] - children[:, CHILD_LOW] >= WIDE)
    known = (nodes[:, LOW] << 32) + nodes[:, HIGH]
    wanted = (children[wide, CHILD_LOW] << 32) + children[wide, CHILD_HIGH]
    children[wide, CHILD_NODE] = np.searchsorted(known, wanted) + 1


@compiled
def _spans(common_lens: Uint8, nodes: Int64) -> int:
    """Store the wide spans in `nodes`, up to its length, and count all of them."""
    # Open spans, innermost last: how much their suffixes share, and where they begin.
    open_lens, open_lows = np.zeros(257, dtype=np.int64), np.zeros(257, dtype=np.int64)
    last, count = 0, 0
    for place in range(1, len(common_lens) + 1):
        shared = np.int64(common_lens[place]) if place < len(common_lens) else 0
        low = place - 1
        while open_lens[last] > shared:
            low = open_lows[last]
            if place - low >= WIDE:
                if count < len(nodes):
                    nodes[count, LOW], nodes[count, HIGH] = low, place
                    nodes[count, SHARED] = open_lens[last]
                count += 1
            last -= 1
        if open_lens[last] < shared:
            last += 1
            open_lens[last], open_lows[last] = shared, low
    return count


@compiled
def _children(
    text: Uint32, suffixes: Uint32, common_lens: Uint8, nodes: Int64, children: Int64
) -> int:
    """Store the children in `children`, up to its length, and count all of them."""
    count = 0
    for node in nodes:
        node[FIRST] = count
        at, low, least = node[SHARED], node[LOW], (node[HIGH] - node[LOW]) / MOST_CHILDREN
        for place in range(low + 1, node[HIGH] + 1):
            if place < node[HIGH] and common_lens[place] > at:
                continue
            if place - low >= least:
                token = _token(text, np.int64(suffixes[low]) + at)
                if token >= 0:
                    if count < len(children):
                        children[count, CHILD_TOKEN] = token
                        children[count, CHILD_LOW], children[count, CHILD_HIGH] = low, place
                    count += 1
            low = place
    return count


@compiled
def _token(text: Uint32, place: int) -> int:
    """The token at `place` of the text; -1 at the end of a document or of the text."""
    if place >= len(text) or text[place] == np.uint32(0xFFFFFFFF):
        return -1
    return int(text[place])
