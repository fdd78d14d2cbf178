"""k-sequential selection (SpecTr, Sun et al. 2023, arXiv 2310.15141).

Formulas: docs/algorithms/verification.md, "k_seq".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays import ROOT, Float64
from ..steps import VerificationResult
from .candidates import Candidate, Children, Rng, normalised

HALVINGS = 60


def verify_k_seq(distributions: Float64, children: Children, rng: Rng) -> VerificationResult:
    """A path and a token with exactly the target's distribution.

    distributions  float64 [nodes + 1, vocabulary]  p after the root and after each node
    children       those of one node are independent draws of one distribution
    """
    path: list[int] = []
    node = ROOT
    while candidates := children[node + 1]:
        distribution = distributions[node + 1]
        selection = _selection(distribution, candidates)
        accepted = _first_accepted(distribution, candidates, selection.rho, rng)
        if accepted is None:
            return VerificationResult(path, rng.draw(selection.residual))
        node = accepted.node
        path.append(node)
    return VerificationResult(path, rng.draw(distributions[node + 1]))


class _Selection(NamedTuple):
    """The scale that all candidates of a node are tested with, and what is left if all fail."""

    rho: float
    residual: Float64


def _first_accepted(
    distribution: Float64, candidates: Sequence[Candidate], rho: float, rng: Rng
) -> Candidate | None:
    """Each is tested with min(1, p / (rho q)), the same p for all."""
    for candidate in candidates:
        assert candidate.distribution is not None, "k_seq needs draws"
        drawn = float(candidate.distribution[candidate.token])
        if rng.accepts(min(1.0, float(distribution[candidate.token]) / (rho * drawn))):
            return candidate
    return None


def _selection(distribution: Float64, candidates: Sequence[Candidate]) -> _Selection:
    """The smallest rho in [1, k] with 1 - (1 - beta)^k <= rho beta, beta = sum min(q, p / rho)."""
    drawn, count = candidates[0].distribution, len(candidates)
    assert drawn is not None, "k_seq needs draws"

    def beta(rho: float) -> float:
        return float(np.minimum(drawn, distribution / rho).sum())

    low, rho = 1.0, float(count)
    for _ in range(HALVINGS):
        middle = (low + rho) / 2
        if 1.0 - (1.0 - beta(middle)) ** count <= middle * beta(middle):
            rho = middle
        else:
            low = middle
    share = beta(rho)
    taken = np.zeros_like(distribution)
    if share > 0:
        taken = np.minimum(drawn, distribution / rho) * (1.0 - (1.0 - share) ** count) / share
    return _Selection(rho, normalised(np.maximum(distribution - taken, 0.0), distribution))
