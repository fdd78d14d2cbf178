"""Block verification of a sampled chain (Sun et al. 2024, arXiv 2403.10444).

The length of the accepted prefix is decided jointly: on average at least as long as token by token.
Formulas: docs/algorithms/verification.md, "Block verification".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..candidates import Candidate, Chance, Verdict, normalised
from ..types import Float64


def verify_block(laws: Float64, chain: Sequence[Candidate], chance: Chance) -> Verdict:
    """A prefix of the chain and a token with exactly the target's law.

    laws   float64 [len(chain) + 1, vocabulary]  p after the root and after each token of the chain
    chain  its tokens must be draws of their laws: no sorting, filtering or dropping by value
    """
    scales = _scales(laws, chain)
    surpluses = [_surplus(laws, chain, scales, length) for length in range(len(chain))]
    length = kept_length(scales, [float(surplus.sum()) for surplus in surpluses], chance)
    path = [candidate.node for candidate in chain[:length]]
    law = laws[length]
    if length < len(chain):
        law = normalised(surpluses[length], law)
    return Verdict(path, chance.draw(law))


def kept_length(scales: Sequence[float], totals: Sequence[float], chance: Chance) -> int:
    """How much of a chain is accepted: tested from its end, each prefix with h_i.

    scales  P_i of each prefix, that of none first
    totals  the mass of max(P_i p - q, 0) after each prefix but the whole chain
    """
    for length in range(len(totals), 0, -1):
        keep = scales[length]
        if length < len(totals) and keep < 1.0:
            keep = totals[length] / (totals[length] + 1.0 - keep)
        if chance.accepts(keep):
            return length
    return 0


def _scales(laws: Float64, chain: Sequence[Candidate]) -> list[float]:
    """P_i = min(1, P_{i-1} p(x_i) / q(x_i)), P_0 = 1."""
    scales = [1.0]
    for law, candidate in zip(laws, chain, strict=False):
        ratio = float(law[candidate.token]) / float(_law(candidate, len(law))[candidate.token])
        scales.append(min(1.0, scales[-1] * ratio))
    return scales


def _surplus(
    laws: Float64, chain: Sequence[Candidate], scales: Sequence[float], length: int
) -> Float64:
    """max(P_i p - q, 0) after a prefix."""
    law = laws[length]
    return np.maximum(scales[length] * law - _law(chain[length], len(law)), 0.0)


def _law(candidate: Candidate, vocab_size: int) -> Float64:
    """q, one-hot where the candidate is no draw."""
    if candidate.law is not None:
        return candidate.law
    law = np.zeros(vocab_size)
    law[candidate.token] = 1.0
    return law
