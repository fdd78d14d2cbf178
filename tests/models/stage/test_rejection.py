"""Sequential verification in torch decides as in numpy, with the same random numbers."""

from __future__ import annotations

import numpy as np
import torch
from draftline.core.arrays import ROOT
from draftline.core.proposals import DraftDistributions, Proposal
from draftline.core.steps import TreeCandidates, Verification
from draftline.core.tree.merge import merge
from draftline.core.verify.rules import candidates_of, no_candidates
from draftline.models.stage.acceptance_rules import verify_rejections
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inputs.plain_rules import ReferenceRng, children_of, verify_rejection

VOCAB = 6


def random_proposal(rng: np.random.Generator, name: str) -> Proposal:
    """A random tree, its nodes drawn from random cut distributions, or no draws."""
    size = int(rng.integers(0, 7))
    parents = np.array([rng.integers(ROOT, node) for node in range(size)], dtype=np.int32)
    ids = np.array([rng.permutation(VOCAB)[:4] for _ in range(size)], dtype=np.int32).reshape(-1, 4)
    probs = rng.dirichlet(np.ones(4), size).astype(np.float32).reshape(-1, 4)
    tokens = np.array([rng.choice(row) for row in ids], dtype=np.int32)
    distributions = DraftDistributions(ids, probs) if rng.random() < 0.7 else None
    return Proposal(
        name, tokens, parents, np.zeros(size, dtype=np.float32), distributions=distributions
    )


def random_tree(rng: np.random.Generator) -> TreeCandidates:
    found = [random_proposal(rng, name) for name in ("a", "b")[: int(rng.integers(0, 3))]]
    if not found:
        return no_candidates("rejection")
    max_nodes = int(rng.integers(0, 12))
    return candidates_of("rejection", merge(found, max_nodes, 5), found, max_nodes)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_every_verification_result_is_that_of_the_plain_rule(num_trees: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    trees = tuple(random_tree(rng) for _ in range(num_trees))
    seeds = tuple(rng.integers(0, 2**62, num_trees).tolist())
    positions = tuple(rng.integers(0, 2**20, num_trees).tolist())
    sizes = [1 + tree.num_nodes for tree in trees]
    distributions = rng.dirichlet(np.full(VOCAB, 0.5), sum(sizes))
    # Some targets are greedy.
    distributions[rng.random(len(distributions)) < 0.2] = np.eye(VOCAB)[3]
    found = verify_rejections(
        torch.from_numpy(distributions), Verification(trees, seeds, positions)
    )
    first = 0
    for tree, size, verification_result, place in zip(
        trees, sizes, found, range(num_trees), strict=True
    ):
        rng = ReferenceRng(seeds[place], positions[place])
        assert verification_result == verify_rejection(
            distributions[first : first + size], children_of(tree, VOCAB), rng
        )
        first += size
