"""Typical acceptance (Medusa, Cai et al. 2024, arXiv 2401.10774), which is lossy.

Formula: docs/algorithms/verification.md, "Typical".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..arrays import ROOT, Float64
from ..steps import VerificationResult
from .candidates import Candidate, Children, Rng

EPSILON = 0.09
ALPHA = 0.3
# Keeps the logarithm finite, as in Medusa's code.
LEAST = 1e-5


def verify_typical(
    distributions: Float64,
    children: Children,
    rng: Rng,
    *,
    epsilon: float = EPSILON,
    alpha: float = ALPHA,
) -> VerificationResult:
    """The longest path of tokens that are likely enough, and a token of the target after it.

    distributions  float64 [nodes + 1, vocabulary]  p after the root and after each node

    A token passes if p(x) > min(epsilon, alpha exp(-H(p))), H in nats; of the longest paths the
    most likely one is taken. The text does not have the target's distribution.
    """
    likely = [
        _typical(distribution, candidates, epsilon, alpha)
        for distribution, candidates in zip(distributions, children, strict=True)
    ]
    path = longest_path(likely)
    return VerificationResult(path, rng.draw(distributions[path[-1] + 1 if path else 0]))


def least_likelihood(entropy: float, epsilon: float = EPSILON, alpha: float = ALPHA) -> float:
    """What a token's probability must exceed where the distribution's entropy, in nats, is this."""
    return min(epsilon, alpha * math.exp(-entropy))


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


def _typical(
    distribution: Float64, candidates: Sequence[Candidate], epsilon: float, alpha: float
) -> list[tuple[int, float]]:
    least = least_likelihood(
        -float(np.sum(distribution * np.log(distribution + LEAST))), epsilon, alpha
    )
    likelihoods = [
        (candidate.node, float(distribution[candidate.token])) for candidate in candidates
    ]
    return [pair for pair in likelihoods if pair[1] > least]
