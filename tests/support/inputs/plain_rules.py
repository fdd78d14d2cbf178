"""The acceptance rules in their simplest form: numpy, tree by tree, candidate by candidate.

p is the target's processed distribution after a node, q the distribution that a candidate was drawn
from, as in the papers. Distributions are float64 and sum to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from draftline.core.arrays import ROOT, Float64, Int32
from draftline.core.steps import TreeCandidates, VerificationResult
from draftline.core.verify.rules import SeededRng
from draftline.models.stage.acceptance_rules import LEAST, least_likelihood, longest_path


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A proposal for the token after a node.

    node          its place in the tree; several candidates of one token share it
    token         what is proposed
    distribution  float64 [vocabulary]: q, given all that was drawn before it; None: the candidate
                  is no draw but a function of the past, or was sorted, filtered or pruned by its
                  value, so that only its one-hot distribution is safe
    """

    node: int
    token: int
    distribution: Float64 | None = None

    def acceptance(self, distribution: Float64) -> float:
        """min(1, r / q) of its token, r being what `distribution` leaves it."""
        left = float(distribution[self.token])
        if self.distribution is None:
            return min(1.0, left)
        drawn = float(self.distribution[self.token])
        assert drawn > 0, "a token that its own distribution excludes cannot have been drawn"
        return min(1.0, left / drawn)

    def residual(self, distribution: Float64) -> Float64:
        """norm(max(r - q, 0)): what is left of `distribution` once the candidate was refused."""
        if self.distribution is None:
            left = distribution.copy()
            left[self.token] = 0.0
        else:
            left = np.maximum(distribution - self.distribution, 0.0)
        return normalised(left, distribution)


class Rng(Protocol):
    """Where uniforms and draws come from; independent of each other and of all candidates."""

    def accepts(self, probability: float) -> bool:
        """True with this probability, decided by the next uniform number."""
        ...

    def draw(self, distribution: Float64) -> int:
        """A token of this distribution."""
        ...


# By node + 1, the root's first: candidates for the token after it, in the order of their tests.
Children = Sequence[Sequence[Candidate]]


def normalised(weights: Float64, otherwise: Float64) -> Float64:
    """`weights` as a distribution; where rounding left no mass at all, `otherwise`."""
    total = weights.sum()
    return weights / total if total > 0 else otherwise


def children_of(candidates: TreeCandidates, vocab_size: int) -> list[list[Candidate]]:
    """The candidates after the root and after each node, with whole distributions."""
    children: list[list[Candidate]] = [[] for _ in range(candidates.num_nodes + 1)]
    rows = zip(
        candidates.parents.tolist(),
        candidates.nodes.tolist(),
        candidates.tokens.tolist(),
        candidates.distribution_ids,
        candidates.distribution_probs.astype(np.float64),
        strict=True,
    )
    for parent, node, token, ids, probs in rows:
        children[parent + 1].append(Candidate(node, token, _whole(ids, probs, vocab_size)))
    return children


def _whole(ids: Int32, probs: Float64, vocab_size: int) -> Float64 | None:
    total = probs.sum()
    if total == 0:
        return None
    distribution = np.zeros(vocab_size)
    np.add.at(distribution, ids, probs / total)
    return distribution


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


def verify_typical(
    distributions: Float64,
    children: Children,
    rng: Rng,
) -> VerificationResult:
    """The longest path of tokens that are likely enough, and a token of the target after it.

    distributions  float64 [nodes + 1, vocabulary]  p after the root and after each node

    A token passes if p(x) > min(epsilon, alpha exp(-H(p))), H in nats; of the longest paths the
    most likely one is taken. The text does not have the target's distribution.
    """
    likely = [
        _typical(distribution, candidates)
        for distribution, candidates in zip(distributions, children, strict=True)
    ]
    path = longest_path(likely)
    return VerificationResult(path, rng.draw(distributions[path[-1] + 1 if path else 0]))


def _typical(distribution: Float64, candidates: Sequence[Candidate]) -> list[tuple[int, float]]:
    least = least_likelihood(-float(np.sum(distribution * np.log(distribution + LEAST))))
    likelihoods = [
        (candidate.node, float(distribution[candidate.token])) for candidate in candidates
    ]
    return [pair for pair in likelihoods if pair[1] > least]


Rule = Callable[[Float64, Children, Rng], VerificationResult]
RULES: Mapping[str, Rule] = {"rejection": verify_rejection, "typical": verify_typical}


class ReferenceRng(SeededRng):
    """Tests and draws by the random numbers that the last stage uses."""

    __slots__ = ()

    def accepts(self, probability: float) -> bool:
        return self.uniform() < probability

    def draw(self, distribution: Float64) -> int:
        sums = np.cumsum(distribution)
        token = np.searchsorted(sums, self.uniform() * sums[-1], side="right")
        # Rounding must not choose a token behind the last possible one.
        return int(min(token, np.flatnonzero(distribution)[-1]))
