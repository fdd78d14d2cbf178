"""Traversal verification beside the logits: `core/verify/traversal.py` in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.arrays import ROOT
from ...core.steps import TreeCandidates, VerificationResult
from ...core.verify.rules import SeededRng
from .candidates import CandidateDistributions, draw_one, normalised


def verify_traversal(
    distributions: Tensor, tree: TreeCandidates, rng: SeededRng
) -> VerificationResult:
    """The path of a tree that the rule accepts, and the token after it.

    distributions  float64 [nodes + 1, vocabulary]  the root's, then each node's
    """
    traversal = _Traversal(distributions, tree)
    while True:
        node = traversal.first_leaf()
        if node == ROOT or rng.accepts(traversal.scales[node]):
            return VerificationResult(
                traversal.path(node), draw_one(traversal.distributions[node + 1], rng.uniform())
            )
        traversal.refuse(node)


class _Traversal:
    """The tree that is left, as in numpy.

    Distributions stay on their device; removing a leaf fetches a few numbers.
    """

    def __init__(self, distributions: Tensor, tree: TreeCandidates) -> None:
        self.distributions = distributions.clone()
        self.scales: dict[int, float] = {ROOT: 1.0}
        self._drawn = CandidateDistributions.of(tree, distributions.device)
        self._nodes, self._parents = tree.nodes.tolist(), tree.parents.tolist()
        assert len(set(self._nodes)) == len(self._nodes), "a node has several candidates"
        self._indices = {node: index for index, node in enumerate(self._nodes)}
        self._tokens = torch.from_numpy(tree.tokens).to(distributions.device).long()
        is_token = self._drawn.ids == self._tokens[:, None]
        self._draft_probs = torch.where(is_token, self._drawn.probs, 0.0).sum(dim=1)
        self._children: list[list[int]] = [[] for _ in range(len(distributions))]
        for index, parent in enumerate(self._parents):
            self._children[parent + 1].append(index)
        self._scale_below(ROOT)

    def first_leaf(self) -> int:
        """The deepest node on the path of first candidates; ROOT if the root has none."""
        node = ROOT
        while indices := self._children[node + 1]:
            node = self._nodes[indices[0]]
        return node

    def path(self, node: int) -> list[int]:
        """The nodes from below the root down to `node`."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self._parents[self._indices[node]]
        return path[::-1]

    def refuse(self, leaf: int) -> None:
        """Remove a leaf, which is its parent's first candidate, and rescale what is left."""
        parent = self._parents[self._indices[leaf]]
        index = self._children[parent + 1].pop(0)
        distribution, scale = self.distributions[parent + 1], self.scales[parent]
        taken = self._drawn.whole(slice(index, index + 1), len(distribution))[0]
        surplus = (scale * distribution - taken).clamp(min=0.0)
        total = float(surplus.sum())
        self.distributions[parent + 1] = normalised(surplus, distribution)
        if parent != ROOT:
            self.scales[parent] = total / (total + 1.0 - scale) if total > 0 else 0.0
        self._scale_below(parent)

    def _scale_below(self, node: int) -> None:
        indices = self._children[node + 1]
        if not indices:
            return
        ratios = self.distributions[node + 1][self._tokens[indices]] / self._draft_probs[indices]
        for index, ratio in zip(indices, ratios.tolist(), strict=True):
            child = self._nodes[index]
            self.scales[child] = min(1.0, self.scales[node] * ratio)
            self._scale_below(child)
