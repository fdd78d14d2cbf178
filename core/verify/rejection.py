"""Sequential residual verification in numpy; `models/verify/rejection.py` has it in torch.

Candidates are tested one by one, each with its own distribution. One rule for Leviathan's and
Chen's chains, SPECTRA's greedy and sample verification, SpecInfer's multi-step sampling and
Sequoia's draws without replacement. See docs/algorithms/verification.md, "Rejection".
"""

from __future__ import annotations

from ..arrays import ROOT, Float64
from ..steps import VerificationResult
from .candidates import Children, Rng


def verify_rejection(distributions: Float64, children: Children, rng: Rng) -> VerificationResult:
    """A path and a token with exactly the target's distribution.

    distributions  float64 [nodes + 1, vocabulary]  p after the root and after each node
    children       tested in their order, which must not depend on values that were drawn and not
                   tested

    A candidate is accepted with min(1, r(x) / q(x)); r begins as p and loses q with each refusal.
    """
    path: list[int] = []
    node = ROOT
    while True:
        left = distributions[node + 1]
        for candidate in children[node + 1]:
            if rng.accepts(candidate.acceptance(left)):
                node = candidate.node
                path.append(node)
                break
            left = candidate.residual(left)
        else:
            return VerificationResult(path, rng.draw(left))
