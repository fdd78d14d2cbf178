"""k-sequential selection (SpecTr, Sun et al. 2023, arXiv 2310.15141).

Formulas: docs/algorithms/verification.md, "k_seq".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..candidates import Candidate, Chance, Children, Verdict, normalised
from ..types import ROOT, Float64

HALVINGS = 60


def verify_k_seq(laws: Float64, children: Children, chance: Chance) -> Verdict:
    """A path and a token with exactly the target's law.

    laws      float64 [nodes + 1, vocabulary]  p after the root and after each node
    children  those of one node are independent draws of one law
    """
    path: list[int] = []
    node = ROOT
    while candidates := children[node + 1]:
        law = laws[node + 1]
        selection = _selection(law, candidates)
        accepted = _first_accepted(law, candidates, selection.rho, chance)
        if accepted is None:
            return Verdict(path, chance.draw(selection.residual))
        node = accepted.node
        path.append(node)
    return Verdict(path, chance.draw(laws[node + 1]))


class _Selection(NamedTuple):
    """The scale that all candidates of a node are tested with, and what is left if all fail."""

    rho: float
    residual: Float64


def _first_accepted(
    law: Float64, candidates: Sequence[Candidate], rho: float, chance: Chance
) -> Candidate | None:
    """Each is tested with min(1, p / (rho q)), the same p for all."""
    for candidate in candidates:
        assert candidate.law is not None, "k_seq needs draws"
        drawn = float(candidate.law[candidate.token])
        if chance.accepts(min(1.0, float(law[candidate.token]) / (rho * drawn))):
            return candidate
    return None


def _selection(law: Float64, candidates: Sequence[Candidate]) -> _Selection:
    """The smallest rho in [1, k] with 1 - (1 - beta)^k <= rho beta, beta = sum min(q, p / rho)."""
    drawn, count = candidates[0].law, len(candidates)
    assert drawn is not None, "k_seq needs draws"

    def beta(rho: float) -> float:
        return float(np.minimum(drawn, law / rho).sum())

    low, rho = 1.0, float(count)
    for _ in range(HALVINGS):
        middle = (low + rho) / 2
        if 1.0 - (1.0 - beta(middle)) ** count <= middle * beta(middle):
            rho = middle
        else:
            low = middle
    share = beta(rho)
    taken = np.zeros_like(law)
    if share > 0:
        taken = np.minimum(drawn, law / rho) * (1.0 - (1.0 - share) ** count) / share
    return _Selection(rho, normalised(np.maximum(law - taken, 0.0), law))
