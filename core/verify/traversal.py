"""Traversal verification (arXiv 2505.12398): a sampled tree from its leaves up.

A whole path may be accepted though one of its tokens alone would be refused: the tree's form of
block verification. Where every candidate is one-hot it equals sequential verification.
Formulas: docs/algorithms/verification.md, "Traversal".
"""

from __future__ import annotations

import numpy as np

from ..arrays import ROOT, Float64
from ..steps import VerificationResult
from .candidates import Candidate, Children, Rng, leaf_first, normalised


def verify_traversal(distributions: Float64, children: Children, rng: Rng) -> VerificationResult:
    """A path and a token with exactly the target's distribution.

    distributions  float64 [nodes + 1, vocabulary]  p after the root and after each node
    children       draws with or without replacement and one-hot candidates, in any mix; each node
                   has one candidate only

    The first leaf is accepted with all above it, or refused alone; its parent's distribution then
    loses what the leaf stood for.
    """
    traversal = _Traversal(distributions, children)
    while True:
        node = leaf_first(traversal.children)
        if node == ROOT or rng.accepts(traversal.scales[node]):
            return VerificationResult(
                traversal.path(node), rng.draw(traversal.distributions[node + 1])
            )
        traversal.refuse(node)


class _Traversal:
    """What is left of the tree, its distributions, and A of every node: how likely its path is
    accepted.
    """

    def __init__(self, distributions: Float64, children: Children) -> None:
        self.distributions = distributions.copy()
        self.children: list[list[Candidate]] = [list(candidates) for candidates in children]
        self.scales: dict[int, float] = {ROOT: 1.0}
        self._parents = {
            candidate.node: node - 1
            for node, candidates in enumerate(children)
            for candidate in candidates
        }
        assert len(self._parents) == sum(map(len, children)), "a node has several candidates"
        self._scale_below(ROOT)

    def path(self, node: int) -> list[int]:
        """The nodes from below the root down to `node`."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self._parents[node]
        return path[::-1]

    def refuse(self, leaf: int) -> None:
        """Take a leaf away, which is its parent's first candidate."""
        parent = self._parents[leaf]
        candidate = self.children[parent + 1].pop(0)
        distribution, scale = self.distributions[parent + 1], self.scales[parent]
        if candidate.distribution is None:
            taken = np.zeros_like(distribution)
            taken[candidate.token] = 1.0
        else:
            taken = candidate.distribution
        surplus = np.maximum(scale * distribution - taken, 0.0)
        total = float(surplus.sum())
        self.distributions[parent + 1] = normalised(surplus, distribution)
        if parent != ROOT:
            self.scales[parent] = total / (total + 1.0 - scale) if total > 0 else 0.0
        self._scale_below(parent)

    def _scale_below(self, node: int) -> None:
        """A(child) = min(1, A(node) p(x) / q(x)), and so on down."""
        for candidate in self.children[node + 1]:
            drawn = (
                1.0
                if candidate.distribution is None
                else float(candidate.distribution[candidate.token])
            )
            left = self.scales[node] * float(self.distributions[node + 1][candidate.token])
            self.scales[candidate.node] = min(1.0, left / drawn)
            self._scale_below(candidate.node)
