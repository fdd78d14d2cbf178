"""Typical acceptance beside the logits: `core/verify/typical.py` in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.steps import TreeCandidates, VerificationResult
from ...core.verify.rules import SeededRng
from ...core.verify.typical import LEAST, least_likelihood, longest_path
from .candidates import draw_one


def verify_typical(
    distributions: Tensor, tree: TreeCandidates, rng: SeededRng
) -> VerificationResult:
    """The path of a tree that the rule accepts, and the token after it.

    distributions  float64 [nodes + 1, vocabulary]  the root's, then each node's
    """
    entropies = -(distributions * torch.log(distributions + LEAST)).sum(dim=1)
    parents = torch.from_numpy(tree.parents).to(distributions.device).long() + 1
    tokens = torch.from_numpy(tree.tokens).to(distributions.device).long()
    likely: list[list[tuple[int, float]]] = [[] for _ in range(len(distributions))]
    least = [least_likelihood(entropy) for entropy in entropies.tolist()]
    probabilities = distributions[parents, tokens].tolist()
    for parent, node, probability in zip(
        tree.parents.tolist(), tree.nodes.tolist(), probabilities, strict=True
    ):
        if probability > least[parent + 1]:
            likely[parent + 1].append((node, probability))
    path = longest_path(likely)
    return VerificationResult(
        path, draw_one(distributions[path[-1] + 1 if path else 0], rng.uniform())
    )
