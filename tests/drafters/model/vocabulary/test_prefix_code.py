"""SLRS: psi against the sum over all strings, and the rule that is told of it."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from draftline.core.arrays import ROOT, Float64
from draftline.core.errors import ConfigError
from draftline.drafters.coupled_rank import CoupledChoice
from draftline.drafters.model.vocabulary.string_tree import (
    FirstTargetTokens,
    StringExpansion,
    StringLimits,
    check_prefix_code,
    coupled_first,
    drawn_first,
)
from draftline.drafters.model.vocabulary.written import Retokenizer, WrittenText
from support.inputs.enumeration import Branch, outcomes
from support.inputs.plain_rules import Candidate, verify_rejection
from support.tools.tiny_tokenizers import letters, single_bytes, unigram, vocabulary

DRAFT = letters("a", "b")
TARGET = letters("a", "b", "ab", "aab", "bbb")
END = 2
EVERYTHING = StringLimits(choices=3, width=10_000, least_mass=0.0)


@cache
def next_probs(string: tuple[int, ...]) -> Float64:
    """The drafter's distribution after a string: any function of it."""
    return np.random.default_rng([7, *string]).dirichlet(np.ones(3))


def grown(limits: StringLimits, temperature: float = 1.0) -> StringExpansion:
    text = WrittenText(DRAFT, TARGET, Retokenizer(DRAFT), [1])
    first = FirstTargetTokens(DRAFT, TARGET)
    strings = StringExpansion(first, text, limits)
    while strings.frontier:
        ids, log_probs = [], []
        for node in strings.frontier:
            path: list[int] = []
            place = node
            while place != ROOT:
                path.insert(0, strings.tokens[place])
                place = strings.parents[place]
            probs = next_probs(tuple(path)) ** (1 / temperature)
            order = np.argsort(-probs)[: limits.choices]
            kept = probs[order] / probs[order].sum()
            ids.append(order.tolist())
            log_probs.append(np.log(kept).tolist())
        strings.grow(ids, log_probs)
    return strings


def brute_force(length: int) -> dict[int, float]:
    """The sum over all strings of a length at which the first token of each is settled."""
    psi: dict[int, float] = {}

    def add(string: tuple[int, ...], mass: float) -> None:
        if len(string) == length or string[-1:] == (END,):
            text = "".join("ab"[token] for token in string if token != END)
            token = TARGET.encode(text)[0] if text else TARGET.end
            assert token is not None
            psi[token] = psi.get(token, 0.0) + mass
            return
        for token, prob in enumerate(next_probs(string)):
            add((*string, token), mass * prob)

    add((), 1.0)
    return psi


def test_psi_is_the_sum_over_all_strings() -> None:
    psi = grown(EVERYTHING).psi()
    assert abs(sum(psi.values()) - 1) < 1e-9
    # The longest token has three letters, so that a longer string settles nothing more.
    expected = brute_force(7)
    assert psi.keys() == expected.keys()
    for token, mass in expected.items():
        assert abs(psi[token] - mass) < 1e-9


@pytest.mark.parametrize("limits", [EVERYTHING, StringLimits(2, 1, 0.2), StringLimits(3, 2, 0.05)])
def test_a_rule_that_is_told_of_psi_is_exact_whatever_is_left_out(limits: StringLimits) -> None:
    psi = grown(limits).psi()
    assert abs(sum(psi.values()) - 1) < 1e-9
    told = np.zeros(6)
    for token, mass in psi.items():
        told[token] = mass
    p = np.random.default_rng(3).dirichlet(np.ones(6))
    committed = np.zeros(6)

    def run(branch: Branch) -> int:
        candidate = Candidate(0, branch.draw(told), told)
        result = verify_rejection(np.stack([p, p]), [[candidate], []], branch)
        return candidate.token if result.path else result.token

    for weight, token in outcomes(run):
        committed[token] += weight
    np.testing.assert_allclose(committed, p, atol=1e-12)


def test_it_accepts_more_than_comparing_texts() -> None:
    psi = grown(EVERYTHING).psi()
    better = []
    for seed in range(50):
        p = np.random.default_rng(seed).dirichlet(np.ones(6))
        told = np.array([psi.get(token, 0.0) for token in range(6)])
        better.append(np.minimum(p, told).sum() - (p * told).sum())
    assert min(better) >= 0
    assert np.mean(better) > 0.1


def test_draws_follow_what_is_declared_and_noise_follows_psi() -> None:
    psi = {0: 0.5, 3: 0.3, 2: 0.15, 4: 0.05}
    rng = np.random.default_rng(0)
    counts = dict.fromkeys(psi, 0)
    for _ in range(4000):
        token, log_prob, (ids, probs) = drawn_first(psi, 3, rng)
        counts[token] += 1
        assert ids.tolist() == [0, 3, 2]
        np.testing.assert_allclose(probs, np.array([0.5, 0.3, 0.15]) / 0.95, rtol=1e-5)
        assert abs(np.exp(log_prob) - psi[token] / 0.95) < 1e-5
    assert counts[4] == 0
    assert abs(counts[0] / 4000 - 0.5 / 0.95) < 0.03
    assert coupled_first(psi, CoupledChoice(0.0, 1, 5))[0] == 0
    chosen = [coupled_first(psi, CoupledChoice(0.7, seed, 5))[0] for seed in range(3000)]
    # Psi is of the temperature already: the noise draws from it as it is.
    assert abs(chosen.count(3) / 3000 - 0.3) < 0.03


def test_only_small_alphabets_of_one_spelling_are_taken() -> None:
    check_prefix_code(vocabulary(single_bytes()))
    check_prefix_code(DRAFT)
    with pytest.raises(ConfigError, match="one spelling of every text"):
        check_prefix_code(TARGET)
    with pytest.raises(ConfigError, match=r"one spelling|for drafters of single bytes"):
        check_prefix_code(vocabulary(unigram()))
    many = letters(*(chr(0x4E00 + place) for place in range(600)))
    with pytest.raises(ConfigError, match="for drafters of single bytes"):
        check_prefix_code(many)
