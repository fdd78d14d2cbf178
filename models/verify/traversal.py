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
    """What the rule decides about a tree; distributions float64 [nodes + 1, vocabulary]."""
    traversal = _Traversal(distributions, tree)
    while True:
        node = traversal.first_leaf()
        if node == ROOT or rng.accepts(traversal.scales[node]):
            return VerificationResult(
                traversal.path(node), draw_one(traversal.distributions[node + 1], rng.uniform())
            )
        traversal.refuse(node)


class _Traversal:
    """As in numpy; distributions stay on their device, and a refusal fetches a few numbers."""

    def __init__(self, distributions: Tensor, tree: TreeCandidates) -> None:
        self.distributions = distributions.clone()
        self.scales: dict[int, float] = {ROOT: 1.0}
        self._drawn = CandidateDistributions.of(tree, distributions.device)
        self._nodes, self._parents = tree.nodes.tolist(), tree.parents.tolist()
        assert len(set(self._nodes)) == len(self._nodes), "a node has several candidates"
        self._places = {node: place for place, node in enumerate(self._nodes)}
        self._tokens = torch.from_numpy(tree.tokens).to(distributions.device).long()
        own = self._drawn.ids == self._tokens[:, None]
        self._own = torch.where(own, self._drawn.probs, 0.0).sum(dim=1)
        self._children: list[list[int]] = [[] for _ in range(len(distributions))]
        for place, parent in enumerate(self._parents):
            self._children[parent + 1].append(place)
        self._scale_below(ROOT)

    def first_leaf(self) -> int:
        """The deepest node on the path of first candidates; ROOT if the root has none."""
        node = ROOT
        while places := self._children[node + 1]:
            node = self._nodes[places[0]]
        return node

    def path(self, node: int) -> list[int]:
        """The nodes from below the root down to `node`."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self._parents[self._places[node]]
        return path[::-1]

    def refuse(self, leaf: int) -> None:
        """Take a leaf away, which is its parent's first candidate."""
        parent = self._parents[self._places[leaf]]
        place = self._children[parent + 1].pop(0)
        distribution, scale = self.distributions[parent + 1], self.scales[parent]
        taken = self._drawn.whole(slice(place, place + 1), len(distribution))[0]
        surplus = (scale * distribution - taken).clamp(min=0.0)
        total = float(surplus.sum())
        self.distributions[parent + 1] = normalised(surplus, distribution)
        if parent != ROOT:
            self.scales[parent] = total / (total + 1.0 - scale) if total > 0 else 0.0
        self._scale_below(parent)

    def _scale_below(self, node: int) -> None:
        places = self._children[node + 1]
        if not places:
            return
        ratios = self.distributions[node + 1][self._tokens[places]] / self._own[places]
        for place, ratio in zip(places, ratios.tolist(), strict=True):
            child = self._nodes[place]
            self.scales[child] = min(1.0, self.scales[node] * ratio)
            self._scale_below(child)
