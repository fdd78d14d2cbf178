"""What the acceptance rules of the literature decide about: candidates and their declared
distributions.

p is the target's processed distribution after a node, q the distribution that a candidate was drawn
from, as in the papers. Distributions are float64 and sum to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..arrays import ROOT, Float32, Float64, Int32
from ..proposals import Proposal
from ..steps import TreeCandidates
from ..tree.tree import NO_TREE, TokenTree


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


def leaf_first(children: Children) -> int:
    """The deepest node on the path of first candidates; ROOT if the root has none."""
    node = ROOT
    while children[node + 1]:
        node = children[node + 1][0].node
    return node


def candidates_of(
    rule: str, tree: TokenTree, proposals: Sequence[Proposal], max_nodes: int
) -> TreeCandidates:
    """The candidates of a tree that these proposals were merged in, with at most `max_nodes` nodes.

    Whether a node is tested must not depend on its own token. So once the tree is full no later
    node is, not even one that stands in it already. `k_seq` tests all candidates of a node with one
    scale, so that even their number must not: there a token that was drawn twice counts twice.
    """
    placed = {
        edge: node
        for node, edge in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    }
    used: set[int] = set()
    rows: list[tuple[int, int, int]] = []
    places: list[tuple[Proposal, int]] = []
    for proposal in proposals:
        merged: list[int | None] = []
        edges = zip(proposal.parents.tolist(), proposal.tokens.tolist(), strict=True)
        for index, (drafted_parent, token) in enumerate(edges):
            parent = ROOT if drafted_parent == ROOT else merged[drafted_parent]
            is_full = (len(rows) if rule == "k_seq" else len(used)) >= max_nodes
            node = None if parent is None or is_full else placed.get((parent, token))
            merged.append(node)
            if node is not None and parent is not None:
                used.add(node)
                rows.append((parent, node, token))
                places.append((proposal, index))
    ids, probs = _distributions(places)
    parents, nodes, tokens = np.array(rows, dtype=np.int32).reshape(-1, 3).T
    return TreeCandidates(rule, len(tree), parents, nodes, tokens, ids, probs)


def no_candidates(rule: str) -> TreeCandidates:
    """The candidates of a root without a tree: none."""
    return candidates_of(rule, NO_TREE, (), 0)


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


def _distributions(places: Sequence[tuple[Proposal, int]]) -> tuple[Int32, Float32]:
    width = max(
        (p.distributions.ids.shape[1] for p, _ in places if p.distributions is not None), default=0
    )
    ids = np.zeros((len(places), width), dtype=np.int32)
    probs = np.zeros((len(places), width), dtype=np.float32)
    for row, (proposal, index) in enumerate(places):
        if proposal.distributions is not None:
            num_ids = proposal.distributions.ids.shape[1]
            ids[row, :num_ids] = proposal.distributions.ids[index]
            probs[row, :num_ids] = proposal.distributions.probs[index]
    return ids, probs


def _whole(ids: Int32, probs: Float64, vocab_size: int) -> Float64 | None:
    total = probs.sum()
    if total == 0:
        return None
    distribution = np.zeros(vocab_size)
    np.add.at(distribution, ids, probs / total)
    return distribution
