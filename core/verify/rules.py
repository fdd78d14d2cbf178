"""Verification rules by name, and the choice of one that fits a tree.

See docs/algorithms/verification.md, "Choosing a rule".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..arrays import ROOT, Float64
from ..proposals import Proposal
from ..steps import VerificationResult
from .block_verification import verify_block
from .candidates import Candidate, Children, Rng
from .k_seq import verify_k_seq
from .rejection import verify_rejection
from .traversal import verify_traversal
from .typical import verify_typical

Rule = Callable[[Float64, Children, Rng], VerificationResult]

# Sample-and-match, which needs no rule: the target's own tokens are walked along the tree.
COUPLED = "coupled"
# Texts do not have the target's distribution under these.
LOSSY = frozenset({"typical"})


def rule_for(name: str, proposals: Sequence[Proposal]) -> str:
    """`name` where it can decide about these proposals, else `rejection`, which always can.

    Which rule decides must not depend on what was drawn: only on who proposes, and in which shape.
    """
    drafted = [proposal for proposal in proposals if len(proposal.tokens)]
    if name in ("rejection", "typical"):
        return name
    if len(drafted) != 1 or drafted[0].distributions is None:
        return "rejection"
    is_chain = np.array_equal(drafted[0].parents, np.arange(ROOT, len(drafted[0].tokens) - 1))
    return name if is_chain or name == "traversal" else "rejection"


def _block(distributions: Float64, children: Children, rng: Rng) -> VerificationResult:
    chain: list[Candidate] = []
    rows = [0]
    while candidates := children[rows[-1]]:
        (candidate,) = candidates
        chain.append(candidate)
        rows.append(candidate.node + 1)
    return verify_block(distributions[rows], chain, rng)


RULES: Mapping[str, Rule] = {
    "rejection": verify_rejection,
    "block": _block,
    "traversal": verify_traversal,
    "k_seq": verify_k_seq,
    "typical": verify_typical,
}
