"""The candidates of a step's trees, as the last stage's acceptance rule takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..candidates import Candidate
from ..tree.tree import NO_TREE, TokenTree
from ..types import ROOT, Float32, Float64, Int32, Proposal


@dataclass(frozen=True, slots=True, eq=False)
class TreeCandidates:
    """The candidates of one tree, in the order of their tests.

    rule                that decides about them (`core/verify/rules.py`)
    num_nodes           of the tree
    parents             int32 [c]  the nodes that they follow; -1 is the root
    nodes               int32 [c]  their own; several candidates of one token share a node
    tokens              int32 [c]
    distribution_ids    int32 [c, k]  and
    distribution_probs  float32 [c, k]  what each was drawn from; rows of zeros where it is no draw
    """

    rule: str
    num_nodes: int
    parents: Int32
    nodes: Int32
    tokens: Int32
    distribution_ids: Int32
    distribution_probs: Float32


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """Candidates of a step's trees, in order, and the keys of the rules' random numbers.

    seeds, positions  by tree: the request's seed, and the root's absolute position
    """

    trees: tuple[TreeCandidates, ...]
    seeds: tuple[int, ...]
    positions: tuple[int, ...]


def candidates_of(
    rule: str, tree: TokenTree, proposals: Sequence[Proposal], max_nodes: int
) -> TreeCandidates:
    """The candidates of a tree that these proposals were merged in, with at most `max_nodes` nodes.

    Whether a node is tested must not depend on its own token. So once the tree is full no later
    node is, not even one that stands in it already.
    """
    placed = {
        edge: node
        for node, edge in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    }
    used: set[int] = set()
    rows: list[tuple[int, int, int]] = []
    places: list[tuple[Proposal, int]] = []
    for proposal in proposals:
        found: list[int | None] = []
        own = zip(proposal.parents.tolist(), proposal.tokens.tolist(), strict=True)
        for index, (own_parent, token) in enumerate(own):
            parent = ROOT if own_parent == ROOT else found[own_parent]
            is_full = len(used) >= max_nodes
            node = None if parent is None or is_full else placed.get((parent, token))
            found.append(node)
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
            own = proposal.distributions.ids.shape[1]
            ids[row, :own] = proposal.distributions.ids[index]
            probs[row, :own] = proposal.distributions.probs[index]
    return ids, probs


def _whole(ids: Int32, probs: Float64, vocab_size: int) -> Float64 | None:
    total = probs.sum()
    if total == 0:
        return None
    distribution = np.zeros(vocab_size)
    np.add.at(distribution, ids, probs / total)
    return distribution
