"""Drafting in shared tokens: exact enumeration over toy vocabularies, by the rule in use."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.core.arrays import Float64
from draftline.core.errors import ConfigError
from draftline.core.proposals import DraftRequest
from draftline.drafters.model.vocabulary.strategy import IntersectionVocabulary
from draftline.drafters.model.vocabulary.surfaces import map_vocabularies
from support.inputs.enumeration import Branch, outcomes
from support.inputs.plain_rules import Candidate, verify_rejection
from support.tools.tiny_tokenizers import letters

# Shared are a, b and the ends; the target alone has ab, the drafter alone has x and bx.
TARGET = letters("a", "b", "ab")
DRAFT = letters("b", "x", "bx", "a")
TARGET_SIZE, DRAFT_SIZE = 4, 5
SHARED = map_vocabularies(DRAFT, TARGET, DRAFT_SIZE, TARGET_SIZE)
INTERSECTION = IntersectionVocabulary(SHARED, DRAFT, TARGET)


def softmax(logits: Float64) -> Float64:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def drawn_from(logits: Float64) -> Float64:
    """The distribution of the draws, by the logits of the drafter's own ids."""
    mapped = np.full(INTERSECTION.size, -np.inf)
    mapped[INTERSECTION.output.columns] = logits[INTERSECTION.output.rows]
    return softmax(mapped)


def results(p: Float64, logits: Float64) -> tuple[Float64, float]:
    """The distribution of the committed token, and how probable acceptance is."""
    q = drawn_from(logits)
    distributions = np.stack([p, p])
    committed, accepted = np.zeros(TARGET_SIZE), 0.0

    def run(branch: Branch) -> tuple[int, bool]:
        candidate = Candidate(0, branch.draw(q), q)
        result = verify_rejection(distributions, [[candidate], []], branch)
        is_accepted = bool(result.path)
        return (candidate.token if is_accepted else result.token), is_accepted

    for weight, (token, is_accepted) in outcomes(run):
        committed[token] += weight
        accepted += weight * is_accepted
    return committed, accepted


@pytest.mark.parametrize("seed", range(12))
def test_it_is_exact_and_accepts_at_least_as_much_as_all_tokens_would(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, logits = rng.dirichlet(np.ones(TARGET_SIZE)), rng.normal(size=DRAFT_SIZE) * 2
    token, tli = results(p, logits)
    np.testing.assert_allclose(token, p, atol=1e-6)
    q = drawn_from(logits)
    np.testing.assert_allclose(tli, np.minimum(p, q).sum(), atol=1e-6)
    raw = softmax(logits)
    own = np.zeros(TARGET_SIZE)
    own[SHARED.target_ids] = raw[SHARED.draft_ids]
    assert tli >= np.minimum(p, own).sum() - 1e-9


def test_the_theorem_holds_in_expectation_over_many_pairs() -> None:
    rng = np.random.default_rng(0)
    gains = []
    for _ in range(300):
        p = rng.dirichlet(np.full(TARGET_SIZE, 0.5))
        raw = rng.dirichlet(np.full(DRAFT_SIZE, 0.5))
        q = drawn_from(np.log(raw))
        own = np.zeros(TARGET_SIZE)
        own[SHARED.target_ids] = raw[SHARED.draft_ids]
        gains.append(np.minimum(p, q).sum() - np.minimum(p, own).sum())
    assert min(gains) >= -1e-9
    assert np.mean(gains) > 0.05


def test_tokens_are_fed_as_the_drafter_s_and_texts_are_spelled() -> None:
    assert {token: INTERSECTION.fed(token) for token in (0, 1, 3)} == {0: 3, 1: 0, 3: 4}
    text = INTERSECTION.text(DraftRequest("r", np.array([2, 0], dtype=np.int32), 2, 0.0, 1))
    assert text.tokens == [3, 0, 3]
    assert text.extend([2, 3]) == 3
    assert text.tokens == [3, 0, 3, 3, 0, 4]
    assert INTERSECTION.knows(np.array([0, 3], dtype=np.int32))
    assert not INTERSECTION.knows(np.array([4], dtype=np.int32))


def test_pairs_that_cannot_are_refused() -> None:
    lonely = letters("y")
    nothing = map_vocabularies(lonely, letters("z"), 1, 1)
    with pytest.raises(ConfigError, match="take slem"):
        IntersectionVocabulary(nothing, lonely, letters("z"))
