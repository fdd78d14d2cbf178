"""The static tree of Token Recycling: which candidates of which nodes are drafted.

The paper's tree has 80 nodes; this one has as many as a step takes. Its nodes are bought by falling
expectation, as Sequoia grows its trees, under a fixed guess of how often a candidate is right.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import NamedTuple

MAX_TEMPLATE_NODES = 256
# The candidate of rank r, from 1, is taken for right in so many cases: SHARE * r ** -FALL.
SHARE = 0.36
FALL = 2.2


class TemplateNode(NamedTuple):
    """One node of the template.

    parent  0 is the root, i + 1 is node i of the template
    rank    index among the parent's candidates, best first, from 0
    """

    parent: int
    rank: int


@lru_cache(maxsize=2 * MAX_TEMPLATE_NODES)
def tree_template(num_nodes: int, num_candidates: int) -> tuple[TemplateNode, ...]:
    """At most `num_nodes` nodes of at most `num_candidates` children each, the best ones first.

    So a prefix of a template is the template of fewer nodes.
    """
    # Of each node that may come next: its value, negated, and itself.
    frontier = [(-1.0, TemplateNode(0, 0))]
    nodes: list[TemplateNode] = []
    while frontier and len(nodes) < min(num_nodes, MAX_TEMPLATE_NODES):
        value, node = heapq.heappop(frontier)
        parent, rank = node
        nodes.append(node)
        heapq.heappush(frontier, (value * SHARE, TemplateNode(len(nodes), 0)))
        if rank + 1 < num_candidates:
            fall = ((rank + 2) / (rank + 1)) ** -FALL
            heapq.heappush(frontier, (value * fall, TemplateNode(parent, rank + 1)))
    return tuple(nodes)
