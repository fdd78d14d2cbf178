"""The stopping rules (docs/algorithms/drafters.md, "Stopping rules"), worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from draftline.core.errors import ConfigError
from draftline.drafters.model.stopping import (
    MIN_PAIRS,
    Confidence,
    Constant,
    DraftCosts,
    Drawn,
    Goodput,
    Heuristic,
    Schedule,
    Stopping,
    Svip,
)
from hypothesis import given
from hypothesis import strategies as st


def drawn(*probabilities: float) -> list[Drawn]:
    return [Drawn(math.log(one), 0.0) for one in probabilities]


def test_a_constant_length() -> None:
    rule = Constant()
    assert rule.num_tokens(5, 9) == 5
    assert not rule.stops_after(Drawn(-50.0, 9.0))


def test_the_heuristic_grows_by_two_and_falls_by_one() -> None:
    rule = Heuristic(3, 20)
    lengths = []
    for accepted, draft_len in ((3, 3), (5, 5), (6, 7), (0, 6), (0, 0)):
        lengths.append(rule.num_tokens(20, 1))
        rule.observe(drawn(*[0.5] * draft_len), accepted)
    assert lengths == [3, 5, 7, 6, 5]
    assert rule.num_tokens(4, 1) == 4
    for _ in range(9):
        rule.observe(drawn(0.5), 0)
    assert rule.num_tokens(20, 1) == 1


def test_confidence_keeps_the_unlikely_token_and_stops_after_it() -> None:
    rule = Confidence(0.4, learns=False)
    assert [rule.stops_after(one) for one in drawn(0.9, 0.41, 0.39)] == [False, False, True]
    rule.observe(drawn(*[0.9] * 20), 0)
    assert rule.threshold == 0.4


def test_the_threshold_moves_to_where_mistakes_cost_least() -> None:
    rule = Confidence(0.4, learns=True)
    # Above 0.6 all were accepted, below it none.
    for probability, was_accepted in ((0.9, 1), (0.8, 1), (0.7, 1), (0.5, 0), (0.3, 0)):
        rule.observe(drawn(probability), was_accepted)
    assert rule.threshold == 0.4, "too few pairs"
    rule.observe(drawn(0.6), 1)
    assert rule.threshold == pytest.approx(0.6)


def test_tokens_behind_the_first_refused_one_teach_nothing() -> None:
    rule = Confidence(0.4, learns=True)
    for _ in range(MIN_PAIRS):
        rule.observe(drawn(0.9, 0.5, 0.01, 0.01, 0.01), 1)
    # Had they counted as refused, they would be the cheapest to leave out.
    assert rule.threshold == pytest.approx(0.9)


def test_svip_stops_where_the_distribution_is_uncertain() -> None:
    rule = Svip()
    # sqrt(0.15 H) > 0.3 from H = 0.6 on.
    assert not rule.stops_after(Drawn(-3.0, 0.59))
    assert rule.stops_after(Drawn(0.0, 0.61))


def test_a_schedule_by_requests() -> None:
    rule = Schedule([(1, 8), (4, 3), (16, 0)])
    assert [rule.num_tokens(20, count) for count in (1, 2, 4, 5, 16, 99)] == [8, 3, 3, 0, 0, 0]
    assert rule.num_tokens(2, 1) == 2


@pytest.mark.parametrize("steps", [[], [(4, 1), (1, 2)], [(1, 1), (1, 2)]])
def test_a_schedule_must_rise(steps: list[tuple[int, int]]) -> None:
    with pytest.raises(ConfigError, match="schedule"):
        Schedule(steps)


def test_goodput_drafts_long_where_draws_are_cheap_and_right() -> None:
    costs = DraftCosts()
    rule = Goodput(costs)
    assert rule.num_tokens(10, 1) == 10, "nothing is known to cost anything"
    for _ in range(200):
        costs.note_draw(0.2)
        costs.note_verify(1.0)
    for _ in range(200):
        rule.observe(drawn(*[0.5] * 4), 4)
    assert rule.num_tokens(10, 1) == 10
    for _ in range(200):
        rule.observe(drawn(*[0.5] * 4), 0)
    assert rule.num_tokens(10, 1) == 0
    # One draw of probability one half brings 1.5 tokens in 1.2 seconds, two 1.75 in 1.4.
    for _ in range(400):
        rule.observe(drawn(0.5, 0.5), 1)
    assert rule.num_tokens(10, 1) in (1, 2)


def rules() -> list[Stopping]:
    return [
        Constant(),
        Heuristic(4, 8),
        Confidence(0.4, learns=True),
        Svip(),
        Schedule([(2, 5), (9, 1)]),
        Goodput(DraftCosts()),
    ]


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 64)), max_size=12),
    st.integers(0, 2**31),
)
def test_every_rule_stays_within_what_it_may(
    index: int, rounds: list[tuple[int, int, int]], seed: int
) -> None:
    rule, rng = rules()[index], np.random.default_rng(seed)
    for most, accepted, num_requests in rounds:
        length = rule.num_tokens(most, num_requests)
        assert 0 <= length <= most
        draft = [Drawn(-float(rng.exponential()), float(rng.exponential())) for _ in range(length)]
        for one in draft:
            rule.stops_after(one)
        rule.observe(draft, min(accepted, length))
