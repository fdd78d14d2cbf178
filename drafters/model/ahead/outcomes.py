"""How a verification may end: at a node of the tree, with a token that is not its child.

See docs/algorithms/drafters.md, "Drafting ahead".
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from typing import NamedTuple

from ....core.arrays import ROOT, Float32, Int32


class Candidates(NamedTuple):
    """What may come after a node: tokens int32 [k], best first, and float32 [k] the logarithms of
    their probabilities given the request's noise."""

    tokens: Int32
    log_probs: Float32


class Outcome(NamedTuple):
    """The last node that is accepted, the target's token behind it, and the log-probability that
    both are so."""

    node: int
    token: int
    log_prob: float


def likeliest_outcomes(
    tokens: Sequence[int], parents: Sequence[int], candidates: Sequence[Candidates], most: int
) -> list[Outcome]:
    """The most probable ends of a tree's verification, best first.

    tokens, parents  of the tree, as in `Proposal`
    candidates       after the root, and after every node in order
    most             of outcomes

    A node is accepted with the product of the probabilities along its path. One that is not among
    the candidates, since another drafter proposed it, is as probable as the last of them.
    """
    paths = [0.0]
    children: list[set[int]] = [set() for _ in candidates]
    given = [
        dict(zip(own.tokens.tolist(), own.log_probs.tolist(), strict=True)) for own in candidates
    ]
    for token, parent in zip(tokens, parents, strict=True):
        own = given[parent + 1]
        paths.append(paths[parent + 1] + own.get(token, min(own.values())))
        children[parent + 1].add(token)
    found = (
        Outcome(place + ROOT, token, path + log_prob)
        for place, (path, own) in enumerate(zip(paths, given, strict=True))
        for token, log_prob in own.items()
        if token not in children[place]
    )
    return nlargest(most, found, key=lambda outcome: outcome.log_prob)
