"""Trees whose nodes are draws: what is declared is what they were drawn from."""

from __future__ import annotations

import json
from collections import Counter
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from draftline.core.arrays import ROOT
from draftline.core.proposals import DraftRequest, Proposal, Query
from draftline.core.steps import TopTokens
from draftline.drafters.model.drafter import load_model_drafter
from draftline.drafters.model.options import ModelOptions
from draftline.drafters.model.text_distribution import TreeDraws
from scipy.stats import chi2
from support.tools.tiny_models import VOCAB_SIZE, save_tiny_model

SEED = 12
TEXT = np.array([3, 1, 4, 1, 5, 9, 2, 6], dtype=np.int32)
PROBS = np.array([0.5, 0.3, 0.2])
# A sound sampler fails one test of these in ten thousand.
LEAST_P = 1e-4


def output() -> Any:
    """A row after which three tokens are possible."""
    ids, log_probs = np.array([[7, 8, 9]], dtype=np.int32), np.log(PROBS)[None].astype(np.float32)
    return SimpleNamespace(log_probs=SimpleNamespace(top=TopTokens(ids, log_probs)))


def draws(temperature: float = 1.0, seed: int = 0) -> TreeDraws:
    return TreeDraws(3, temperature, np.random.default_rng(seed))


def test_pairs_come_as_often_as_is_declared() -> None:
    source, count = draws(), 6000
    found = Counter(
        tuple(one.token - 7 for one in source.candidates(output(), 0, 2)) for _ in range(count)
    )
    pairs = permutations(range(3), 2)
    expected = {(a, b): PROBS[a] * PROBS[b] / (1 - PROBS[a]) for a, b in pairs}
    assert found.keys() == expected.keys()
    statistic = sum(
        (found[pair] - count * share) ** 2 / (count * share) for pair, share in expected.items()
    )
    assert chi2.sf(statistic, len(expected) - 1) > LEAST_P


def test_a_draw_declares_what_those_before_it_left() -> None:
    first, second, third = draws(temperature=0.5).candidates(output(), 0, 9)
    squares = PROBS**2 / (PROBS**2).sum()
    assert first.distribution.probs == pytest.approx(squares)
    left = np.where(first.distribution.ids == first.token, 0.0, squares)
    assert second.distribution.probs == pytest.approx(left / left.sum())
    assert {first.token, second.token, third.token} == {7, 8, 9}
    assert third.distribution.probs.max() == 1.0
    assert third.log_prob == 0.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tree(tmp_path: Path) -> str:
    path = tmp_path / "tree.json"
    path.write_text(json.dumps({"widths": [2, 3]}))
    return str(path)


def proposed(
    checkpoint: Path, tree: str, temperature: float = 1.0, max_nodes: int = 20, **options: Any
) -> Proposal:
    chosen = ModelOptions(tree=tree, num_blocks=20, distribution_size=8, **options)
    drafter = load_model_drafter(checkpoint, options=chosen)
    drafter.open(DraftRequest("r", TEXT, len(TEXT), temperature, SEED))
    [proposal] = drafter.propose([Query("r", len(TEXT), max_nodes)])
    return proposal


def test_a_tree_has_the_shape_whatever_was_drawn(checkpoint: Path, tree: str) -> None:
    found = proposed(checkpoint, tree)
    assert found.parents.tolist() == [ROOT, ROOT, 0, 0, 0, 1, 1, 1]
    assert found.distributions is not None
    found.distributions.check(found.tokens, VOCAB_SIZE)
    for siblings in ([0, 1], [2, 3, 4], [5, 6, 7]):
        rows = found.distributions.probs[siblings]
        tokens = found.tokens[siblings].tolist()
        assert len(set(tokens)) == len(tokens)
        gone = found.distributions.ids[siblings[1]] == tokens[0]
        assert not rows[1:, gone].any()
    cut = proposed(checkpoint, tree, max_nodes=4)
    assert cut.tokens.tolist() == found.tokens[:4].tolist(), "the first ones, not the best"


def test_without_a_temperature_nothing_is_drawn(checkpoint: Path, tree: str) -> None:
    found = proposed(checkpoint, tree, temperature=0.0)
    assert found.distributions is None
    assert len(found.tokens) == 8


def test_trees_are_drawn_where_there_is_a_distribution(checkpoint: Path, tree: str) -> None:
    assert proposed(checkpoint, tree).distributions is not None
