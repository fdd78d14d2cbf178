"""The acceptance rules by name, the candidates of a tree that they decide about, and the random
numbers that they decide by.

See docs/how-it-works.md, "Other rules".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import ROOT, Float32, Float64, Int32
from ..proposals import Proposal
from ..steps import TreeCandidates
from ..tree.tree import NO_TREE, TokenTree

# Sample-and-match, which needs no rule: the target's own tokens are walked along the tree.
COUPLED = "coupled"
# The last stage decides, beside the logits (`models/stage/acceptance_rules.py`).
REJECTION, TYPICAL = "rejection", "typical"
# Texts do not have the target's distribution under these.
LOSSY = frozenset({TYPICAL})


class SeededRng:
    """A random stream that depends on the request's seed and on a position alone.

    It is not the sampling noise of `core/sampling.py`: drafters may draw with that, and the
    tests of their tokens must not depend on what they drew.
    """

    __slots__ = ("_rng",)

    def __init__(self, seed: int, position: int) -> None:
        key = np.array([seed, position], dtype=np.int64).view(np.uint64)
        self._rng = np.random.Generator(np.random.Philox(key=key))

    def uniforms(self, count: int) -> Float64:
        """The next `count` uniform numbers: one for each test, and one for each draw."""
        return self._rng.random(count)

    def uniform(self) -> float:
        """The next uniform number."""
        return self._rng.random()


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
    drawn: list[tuple[Proposal, int]] = []
    for proposal in proposals:
        merged: list[int | None] = []
        edges = zip(proposal.parents.tolist(), proposal.tokens.tolist(), strict=True)
        for index, (drafted_parent, token) in enumerate(edges):
            parent = ROOT if drafted_parent == ROOT else merged[drafted_parent]
            is_full = len(used) >= max_nodes
            node = None if parent is None or is_full else placed.get((parent, token))
            merged.append(node)
            if node is not None and parent is not None:
                used.add(node)
                rows.append((parent, node, token))
                drawn.append((proposal, index))
    ids, probs = _distributions(drawn)
    parents, nodes, tokens = np.array(rows, dtype=np.int32).reshape(-1, 3).T
    return TreeCandidates(rule, len(tree), parents, nodes, tokens, ids, probs)


def no_candidates(rule: str) -> TreeCandidates:
    """The candidates of a root without a tree: none."""
    return candidates_of(rule, NO_TREE, (), 0)


def _distributions(drawn: Sequence[tuple[Proposal, int]]) -> tuple[Int32, Float32]:
    width = max(
        (p.distributions.ids.shape[1] for p, _ in drawn if p.distributions is not None), default=0
    )
    ids = np.zeros((len(drawn), width), dtype=np.int32)
    probs = np.zeros((len(drawn), width), dtype=np.float32)
    for row, (proposal, index) in enumerate(drawn):
        if proposal.distributions is not None:
            num_ids = proposal.distributions.ids.shape[1]
            ids[row, :num_ids] = proposal.distributions.ids[index]
            probs[row, :num_ids] = proposal.distributions.probs[index]
    return ids, probs
