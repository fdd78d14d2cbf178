"""Ranking nodes by probability and noise together."""

import numpy as np
import pytest
from draftline.core.proposals import Proposal
from draftline.core.sampling import gumbel
from draftline.drafters.coupled_rank import CoupledChoice, coupled_scores, rank_coupled
from hypothesis import given
from hypothesis import strategies as st


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


# Root has children 7 (0.6) and 8 (0.3); 7 has 9 (0.2); 8 has 9 (0.9).
TOKENS, PARENTS = int32(7, 8, 9, 9), int32(-1, -1, 0, 1)
LOG_PROBS = np.log(np.array([0.6, 0.3, 0.2, 0.9])).astype(np.float32)


def test_greedy_ranks_by_path_probability() -> None:
    choice = CoupledChoice(temperature=0.0, seed=3, next_position=10)
    tokens, parents, log_probs = rank_coupled(TOKENS, PARENTS, LOG_PROBS, choice, 4)
    # Path probabilities: 7 0.6, 8 0.3, 8-9 0.27, 7-9 0.12.
    assert tokens.tolist() == [7, 8, 9, 9]
    assert parents.tolist() == [-1, -1, 1, 0]
    np.testing.assert_allclose(np.exp(log_probs), [0.6, 0.3, 0.9, 0.2], rtol=1e-5)


def test_a_cut_keeps_the_best() -> None:
    choice = CoupledChoice(temperature=0.0, seed=3, next_position=10)
    tokens, parents, _ = rank_coupled(TOKENS, PARENTS, LOG_PROBS, choice, 3)
    assert tokens.tolist() == [7, 8, 9]
    assert parents.tolist() == [-1, -1, 1]


def test_scores_use_the_noise_of_the_chosen_position() -> None:
    choice = CoupledChoice(temperature=0.5, seed=11, next_position=20)
    scores = coupled_scores(LOG_PROBS, TOKENS, int32(0, 0, 1, 1), choice)
    noise = gumbel(np.full(4, 11), np.array([20, 20, 21, 21]), TOKENS.astype(np.int64))
    np.testing.assert_allclose(scores, LOG_PROBS / 0.5 + noise, rtol=1e-6)


def test_siblings_share_their_mass_by_softmax_of_the_scores() -> None:
    choice = CoupledChoice(temperature=1.0, seed=5, next_position=2)
    tokens, parents, log_probs = rank_coupled(TOKENS, PARENTS, LOG_PROBS, choice, 4)
    scores = np.exp(coupled_scores(LOG_PROBS, TOKENS, int32(0, 0, 1, 1), choice)[:2])
    first = {
        token: np.exp(log_prob)
        for token, parent, log_prob in zip(tokens, parents, log_probs, strict=True)
        if parent == -1
    }
    assert first[7] == pytest.approx(0.9 * scores[0] / scores.sum(), rel=1e-5)
    assert first[8] == pytest.approx(0.9 * scores[1] / scores.sum(), rel=1e-5)


def test_noise_puts_the_target_s_own_choice_first_when_the_distributions_agree() -> None:
    """With q = p the first ranked child is what the target samples."""
    distribution = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    for position in range(50):
        choice = CoupledChoice(temperature=1.0, seed=9, next_position=position)
        tokens, _, _ = rank_coupled(
            int32(0, 1, 2, 3), int32(-1, -1, -1, -1), distribution, choice, 1
        )
        noise = gumbel(np.full(1, 9), np.full(1, position), np.arange(4))
        assert tokens.tolist() == [int(np.argmax(distribution + noise))]


def test_no_nodes() -> None:
    none = int32()
    choice = CoupledChoice(temperature=1.0, seed=9, next_position=4)
    tokens, parents, log_probs = rank_coupled(none, none, none.astype(np.float32), choice, 4)
    assert len(tokens) == len(parents) == len(log_probs) == 0


@given(st.data(), st.sampled_from([0.0, 1e-4, 0.7, 1.0, 50.0]), st.integers(0, 2**63 - 1))
def test_ranked_trees_are_valid_and_prefixes_of_longer_ones(
    data: st.DataObject, temperature: float, seed: int
) -> None:
    count = data.draw(st.integers(1, 20))
    parents = int32(*(data.draw(st.integers(-1, node - 1)) for node in range(count)))
    tokens = int32(*range(count))
    probs = [data.draw(st.floats(1e-6, 1.0)) for _ in range(count)]
    choice = CoupledChoice(temperature, seed, next_position=17)
    log_probs = np.log(probs).astype(np.float32)
    whole = rank_coupled(tokens, parents, log_probs, choice, count)
    Proposal("x", *whole).check(vocab_size=count)
    assert sorted(whole[0].tolist()) == tokens.tolist()
    # Tokens are unique here, so they tell which node is whose parent.
    above = [-1 if parent < 0 else int(tokens[parent]) for parent in parents.tolist()]
    for token, parent in zip(whole[0].tolist(), whole[1].tolist(), strict=True):
        assert above[token] == (-1 if parent < 0 else int(whole[0][parent]))
    cut = rank_coupled(tokens, parents, log_probs, choice, count // 2)
    for full_array, cut_array in zip(whole, cut, strict=True):
        assert cut_array.tolist() == full_array[: count // 2].tolist()
