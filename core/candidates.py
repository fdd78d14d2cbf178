"""What the acceptance rules of the literature decide about: candidates and their declared
distributions.

p is the target's processed distribution after a node, q the distribution that a candidate was drawn
from, as in the papers. Distributions are float64 and sum to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from .types import ROOT, Float64


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


class VerificationResult(NamedTuple):
    """The accepted nodes, from the root down, and the token after the last of them."""

    path: list[int]
    token: int


# By node + 1, the root's first: candidates for the token after it, in the order of their tests.
Children = Sequence[Sequence[Candidate]]


def normalised(weights: Float64, otherwise: Float64) -> Float64:
    """`weights` as a distribution; where rounding left no mass at all, `otherwise`."""
    total = weights.sum()
    return weights / total if total > 0 else otherwise


def leaf_first(children: Children) -> int:
    """The deepest node on the path of first candidates; ROOT if the root has none."""
    node = ROOT
    while children[node + 1]:
        node = children[node + 1][0].node
    return node
