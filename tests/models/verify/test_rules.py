"""Verification rules in torch decide as those in numpy, with the same random numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from draftline.core.arrays import ROOT, Float64
from draftline.core.draft_distributions import DraftDistributions
from draftline.core.proposals import Proposal
from draftline.core.steps import TreeCandidates, VerificationResult
from draftline.core.tree.merge import merge
from draftline.core.verify.candidates import candidates_of, children_of
from draftline.core.verify.rules import RULES, SeededRng
from draftline.models.verify.apply import TORCH_RULES
from hypothesis import given, settings
from hypothesis import strategies as st

VOCAB = 6
SEEDS = st.integers(0, 2**32 - 1)


def proposal(
    rng: np.random.Generator, parents: list[int], *, draws: bool, distinct: bool = False
) -> Proposal:
    """Nodes below these parents, those of one path draws of one cut distribution; `distinct`
    tokens.
    """
    distributions: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, list[int]]] = {}
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    own_distributions, drawn = [], []
    for node, parent in enumerate(parents):
        path = paths[parent]
        if path not in distributions:
            kept = rng.permutation(VOCAB)[:4]
            distributions[path] = kept, rng.dirichlet(np.ones(4)), rng.permutation(kept).tolist()
        kept, probs, left = distributions[path]
        token = left.pop() if distinct else int(rng.choice(kept))
        paths[node] = (*path, token)
        own_distributions.append((kept, probs))
        drawn.append(token)
    ids = np.array([kept for kept, _ in own_distributions], dtype=np.int32).reshape(-1, 4)
    probs = np.array([probs for _, probs in own_distributions], dtype=np.float32).reshape(-1, 4)
    tokens = np.array(drawn, dtype=np.int32)
    nothing = np.zeros(len(parents), dtype=np.float32)
    declared = DraftDistributions(ids, probs) if draws else None
    own = np.array(parents, dtype=np.int32)
    return Proposal("any", tokens, own, nothing, distributions=declared)


def targets(rng: np.random.Generator, count: int) -> Float64:
    distributions = rng.dirichlet(np.full(VOCAB, 0.5), count)
    # Some are greedy.
    distributions[rng.random(count) < 0.2] = np.eye(VOCAB)[3]
    return distributions


def verification_results(
    rng: np.random.Generator, rule: str, candidates: TreeCandidates
) -> tuple[VerificationResult, VerificationResult]:
    """Results of the numpy and of the torch implementation, with the same random numbers."""
    distributions = targets(rng, 1 + candidates.num_nodes)
    uniforms = (int(rng.integers(2**62)), int(rng.integers(2**20)))
    expected = RULES[rule](distributions, children_of(candidates, VOCAB), SeededRng(*uniforms))
    on_device = torch.from_numpy(distributions.copy())
    found = TORCH_RULES[rule](on_device, candidates, SeededRng(*uniforms))
    assert torch.equal(on_device, torch.from_numpy(distributions)), "the distributions were changed"
    return expected, found


@pytest.mark.parametrize("rule", ["block", "k_seq"])
@settings(deadline=None)
@given(size=st.integers(0, 6), seed=SEEDS)
def test_chains(rule: str, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = [proposal(rng, list(range(ROOT, size - 1)), draws=True)]
    expected, computed = verification_results(
        rng, rule, candidates_of(rule, merge(found, 9, 9), found, 9)
    )
    assert computed == expected


@pytest.mark.parametrize("rule", ["k_seq", "typical"])
@settings(deadline=None)
@given(size=st.integers(0, 8), seed=SEEDS)
def test_trees(rule: str, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(ROOT, node)) for node in range(size)]
    found = [proposal(rng, parents, draws=rule == "k_seq" or rng.random() < 0.5)]
    most = int(rng.integers(1, 10))
    expected, computed = verification_results(
        rng, rule, candidates_of(rule, merge(found, most, 5), found, most)
    )
    assert computed == expected


@settings(deadline=None)
@given(size=st.integers(0, 8), seed=SEEDS)
def test_traversal(size: int, seed: int) -> None:
    """Trees of draws and fixed candidates; no two siblings have one token."""
    rng = np.random.default_rng(seed)
    parents: list[int] = []
    for node in range(size):
        # A distribution has four tokens.
        free = [parent for parent in range(ROOT, node) if parents.count(parent) < 4]
        parents.append(int(rng.choice(free)))
    one = proposal(rng, parents, draws=rng.random() < 0.7, distinct=True)
    tree = merge([one], 9, 9)
    candidates = candidates_of("traversal", tree, [one], 9)
    assert len(tree) == len(candidates.tokens) == len(parents)
    expected, computed = verification_results(rng, "traversal", candidates)
    assert computed == expected
