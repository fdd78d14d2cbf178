"""Verification rules by name, and the choice of one that fits a tree.

See docs/algorithms/verification.md, "Choosing a rule".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..arrays import ROOT, Bool, Float64
from ..draft_distributions import DraftDistributions
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
    declared = drafted[0].distributions if len(drafted) == 1 else None
    if declared is None:
        return "rejection"
    (proposal,) = drafted
    is_all_drawn = declared.probs.any(axis=1).all()
    if np.array_equal(proposal.parents, np.arange(ROOT, len(proposal.tokens) - 1)):
        # Of a chain both are the same, but k_seq has no scale for what was not drawn.
        return name if name != "k_seq" or is_all_drawn else "rejection"
    repeats = _repeats(proposal, declared)
    if name == "traversal" and not repeats.any():
        return name
    if name == "k_seq" and repeats.all() and is_all_drawn:
        return name
    return "rejection"


def _repeats(proposal: Proposal, declared: DraftDistributions) -> Bool:
    """bool, of the nodes that are not their parent's first: whether they were drawn from what the
    first one was. So they are with replacement; without it a draw excludes those before it.
    """
    firsts: dict[int, int] = {}
    repeats: list[bool] = []
    for node, parent in enumerate(proposal.parents.tolist()):
        first = firsts.setdefault(parent, node)
        if first != node and declared.probs[node].any():
            same_ids = np.array_equal(declared.ids[node], declared.ids[first])
            repeats.append(same_ids and np.array_equal(declared.probs[node], declared.probs[first]))
    return np.array(repeats, dtype=np.bool_)


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


class SeededRng:
    """A random stream that depends on the request's seed and on a position alone.

    It is not the sampling noise of `core/sampling/noise.py`: drafters may draw with that, and the
    tests of their tokens must not depend on what they drew.
    """

    __slots__ = ("_rng",)

    def __init__(self, seed: int, position: int) -> None:
        key = np.array([seed, position], dtype=np.int64).view(np.uint64)
        self._rng = np.random.Generator(np.random.Philox(key=key))

    def accepts(self, probability: float) -> bool:
        """See `Rng`."""
        return self.uniform() < probability

    def uniforms(self, count: int) -> Float64:
        """The next `count` uniform numbers: one for each test, and one for each draw."""
        return self._rng.random(count)

    def uniform(self) -> float:
        """The next uniform number."""
        return self._rng.random()

    def draw(self, distribution: Float64) -> int:
        """See `Rng`."""
        sums = np.cumsum(distribution)
        token = np.searchsorted(sums, self.uniform() * sums[-1], side="right")
        # Rounding must not choose a token behind the last possible one.
        return int(min(token, np.flatnonzero(distribution)[-1]))
