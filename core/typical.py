"""Typical acceptance (Medusa; Cai et al. 2024; algorithms.md, section 29). It is lossy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .candidates import Candidate, Chance, Children, Verdict
from .types import ROOT, Float64

EPSILON = 0.09
ALPHA = 0.3
# Keeps the logarithm finite, as in Medusa's code.
LEAST = 1e-5


def verify_typical(
    laws: Float64,
    children: Children,
    chance: Chance,
    *,
    epsilon: float = EPSILON,
    alpha: float = ALPHA,
) -> Verdict:
    """The longest path of tokens that are likely enough, and a token of the target after it.

    laws  float64 [nodes + 1, vocabulary]  p after the root and after each node

    A token passes if p(x) > min(epsilon, alpha exp(-H(p))), H in nats; of the longest paths the
    most likely one is taken. The text does not have the target's law.
    """
    best: tuple[int, float, list[int]] = (0, 0.0, [])
    waiting: list[tuple[int, float, list[int]]] = [(ROOT, 0.0, [])]
    while waiting:
        node, log_likelihood, path = waiting.pop()
        best = max(best, (len(path), log_likelihood, path), key=lambda found: found[:2])
        law = laws[node + 1]
        for candidate in _typical(law, children[node + 1], epsilon, alpha):
            likelihood = log_likelihood + float(np.log(law[candidate.token]))
            waiting.append((candidate.node, likelihood, [*path, candidate.node]))
    path = best[2]
    return Verdict(path, chance.draw(laws[path[-1] + 1 if path else 0]))


def _typical(
    law: Float64, candidates: Sequence[Candidate], epsilon: float, alpha: float
) -> list[Candidate]:
    entropy = -float(np.sum(law * np.log(law + LEAST)))
    least = min(epsilon, alpha * float(np.exp(-entropy)))
    return [candidate for candidate in candidates if law[candidate.token] > least]
