"""Block verification of a sampled chain (Sun et al. 2024, arXiv 2403.10444).

The length of the accepted prefix is decided jointly: on average at least as long as token by token.
Formulas: docs/algorithms/verification.md, "Block verification".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Float64
from ..steps import VerificationResult
from .candidates import Candidate, Rng, normalised


def verify_block(
    distributions: Float64, chain: Sequence[Candidate], rng: Rng
) -> VerificationResult:
    """A prefix of the chain and a token with exactly the target's distribution.

    distributions  float64 [len(chain) + 1, vocabulary]  p after the root and after each token of
                   the chain
    chain          its tokens must be draws of their distributions: no sorting, filtering or
                   dropping by value
    """
    scales = _scales(distributions, chain)
    surpluses = [_surplus(distributions, chain, scales, length) for length in range(len(chain))]
    length = kept_length(scales, [float(surplus.sum()) for surplus in surpluses], rng)
    path = [candidate.node for candidate in chain[:length]]
    distribution = distributions[length]
    if length < len(chain):
        distribution = normalised(surpluses[length], distribution)
    return VerificationResult(path, rng.draw(distribution))


def kept_length(scales: Sequence[float], totals: Sequence[float], rng: Rng) -> int:
    """How much of a chain is accepted: tested from its end, each prefix with h_i.

    scales  P_i of each prefix, that of none first
    totals  the mass of max(P_i p - q, 0) after each prefix but the whole chain
    """
    for length in range(len(totals), 0, -1):
        keep = scales[length]
        if length < len(totals) and keep < 1.0:
            keep = totals[length] / (totals[length] + 1.0 - keep)
        if rng.accepts(keep):
            return length
    return 0


def _scales(distributions: Float64, chain: Sequence[Candidate]) -> list[float]:
    """P_i = min(1, P_{i-1} p(x_i) / q(x_i)), P_0 = 1."""
    scales = [1.0]
    for distribution, candidate in zip(distributions, chain, strict=False):
        ratio = float(distribution[candidate.token]) / float(
            _distribution(candidate, len(distribution))[candidate.token]
        )
        scales.append(min(1.0, scales[-1] * ratio))
    return scales


def _surplus(
    distributions: Float64, chain: Sequence[Candidate], scales: Sequence[float], length: int
) -> Float64:
    """max(P_i p - q, 0) after a prefix."""
    distribution = distributions[length]
    return np.maximum(
        scales[length] * distribution - _distribution(chain[length], len(distribution)), 0.0
    )


def _distribution(candidate: Candidate, vocab_size: int) -> Float64:
    """q, one-hot where the candidate is no draw."""
    if candidate.distribution is not None:
        return candidate.distribution
    distribution = np.zeros(vocab_size)
    distribution[candidate.token] = 1.0
    return distribution
