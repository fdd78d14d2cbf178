"""Typical acceptance (Medusa, Cai et al. 2024, arXiv 2401.10774), which is lossy.

Formula: docs/how-it-works.md, "Typical".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.arrays import ROOT
from ...core.steps import TreeCandidates, VerificationResult
from ...core.verify.rules import SeededRng
from .candidates import draw_one

EPSILON = 0.09
ALPHA = 0.3
# Keeps the logarithm finite, as in Medusa's code.
LEAST = 1e-5


def verify_typical(
    distributions: Tensor, tree: TreeCandidates, rng: SeededRng
) -> VerificationResult:
    """The longest path of tokens that are likely enough, and a token of the target after it.

    distributions  float64 [nodes + 1, vocabulary]  p after the root and after each node

    A token passes if p(x) > min(epsilon, alpha exp(-H(p))), H in nats; of the longest paths the
    most likely one is taken. The text does not have the target's distribution.
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


def least_likelihood(entropy: float) -> float:
    """The threshold of a token's probability for a distribution with this entropy, in nats."""
    return min(EPSILON, ALPHA * math.exp(-entropy))


def longest_path(likely: Sequence[Sequence[tuple[int, float]]]) -> list[int]:
    """The longest path of nodes, of several the most likely.

    likely  by node + 1, the root's first: the nodes that pass after it, and their probabilities
    """
    best: tuple[int, float, list[int]] = (0, 0.0, [])
    waiting: list[tuple[int, float, list[int]]] = [(ROOT, 0.0, [])]
    while waiting:
        node, log_likelihood, path = waiting.pop()
        best = max(best, (len(path), log_likelihood, path), key=lambda found: found[:2])
        waiting += [
            (child, log_likelihood + math.log(probability), [*path, child])
            for child, probability in likely[node + 1]
        ]
    return best[2]
