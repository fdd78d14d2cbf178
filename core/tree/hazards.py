"""Values of nodes in a request whose drafts fail more, or less, often than those of all requests.

An edge that the estimates give the probability p is thought of as surviving the hazard -ln(p). In a
request of hazard ratio r the most probable child of a node is right with p ** r; its siblings share
what that leaves as they did before. So a text that repeats itself gets deep chains where the same
estimates buy another text nothing. Formula: docs/how-it-works.md, "The policy".
"""

from __future__ import annotations

import numpy as np

from ..arrays import Float64, Int32, Int64
from ..compiled import compiled
from .kernels import PARENT

# No edge is surer than this.
MOST_SURE = 0.999


@compiled
def values_under(nodes: Int32, values: Float64, ends: Int64, ratios: Float64) -> Float64:
    """float64 [nodes]: the values in trees of these hazard ratios.

    nodes, values, ends  as of `TreeBatch`, `ends` of the nodes alone
    ratios               float64 [trees]
    """
    found = values.copy()
    first = 0
    for tree in range(len(ends)):
        end = ends[tree]
        if ratios[tree] != 1.0 and end > first:
            _tree_values(nodes[first:end], values[first:end], ratios[tree], found[first:end])
        first = end
    return found


@compiled
def _tree_values(nodes: Int32, values: Float64, ratio: float, found: Float64) -> None:
    best = best_children(nodes, values)
    for node in range(len(nodes)):
        parent = nodes[node, PARENT]
        first = int(best[parent + 1])
        sure = edge(values, nodes, first)
        surer = sure**ratio
        share = surer
        if node != first:
            share = min(edge(values, nodes, node) * (1.0 - surer) / (1.0 - sure), surer)
        found[node] = share * (found[parent] if parent >= 0 else 1.0)


@compiled
def best_children(nodes: Int32, values: Float64) -> Int64:
    """int64 [n + 1]: the child of largest value of the root and of each node; -1: no child."""
    best = np.full(len(nodes) + 1, -1, dtype=np.int64)
    for node in range(len(nodes)):
        parent = nodes[node, PARENT] + 1
        if best[parent] < 0 or values[node] > values[best[parent]]:
            best[parent] = node
    return best


@compiled
def edge(values: Float64, nodes: Int32, node: int) -> float:
    """The probability that a node is right if its parent is."""
    parent = nodes[node, PARENT]
    above = values[parent] if parent >= 0 else 1.0
    return min(values[node] / above, MOST_SURE)
