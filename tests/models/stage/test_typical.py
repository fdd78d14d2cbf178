"""Typical acceptance in torch decides as in its simplest form, with the same random numbers."""

from __future__ import annotations

import numpy as np
import torch
from draftline.core.arrays import ROOT
from draftline.core.proposals import Proposal
from draftline.core.tree.merge import merge
from draftline.core.verify.rules import SeededRng, candidates_of
from draftline.models.stage.acceptance_rules import verify_typical
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inputs.plain_rules import RULES, ReferenceRng, children_of

VOCAB = 6


@settings(deadline=None)
@given(size=st.integers(0, 8), most=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_every_result_is_that_of_the_plain_rule(size: int, most: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parents = np.array([rng.integers(ROOT, node) for node in range(size)], dtype=np.int32)
    tokens = rng.integers(0, VOCAB, size).astype(np.int32)
    found = [Proposal("any", tokens, parents, np.zeros(size, dtype=np.float32))]
    candidates = candidates_of("typical", merge(found, most, 5), found, most)
    distributions = rng.dirichlet(np.full(VOCAB, 0.5), 1 + candidates.num_nodes)
    # Some are greedy.
    distributions[rng.random(len(distributions)) < 0.2] = np.eye(VOCAB)[3]
    key = (int(rng.integers(2**62)), int(rng.integers(2**20)))
    on_device = torch.from_numpy(distributions.copy())
    expected = RULES["typical"](distributions, children_of(candidates, VOCAB), ReferenceRng(*key))
    assert verify_typical(on_device, candidates, SeededRng(*key)) == expected
    assert torch.equal(on_device, torch.from_numpy(distributions)), "the distributions were changed"
