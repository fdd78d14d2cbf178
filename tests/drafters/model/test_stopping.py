"""The stopping rules (docs/drafters.md, "Stopping rules"), worked by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from draftline.core.arrays import ROOT
from draftline.core.proposals import LEVEL_SHARE, Query
from draftline.drafters.model.draft_costs import DraftCosts, DraftRounds
from draftline.drafters.model.stopping_rules import (
    MIN_PAIRS,
    ChainLength,
    Confidence,
    Constant,
    Drawn,
    Goodput,
    Heuristic,
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
    rule = Confidence(0.4)
    assert [rule.stops_after(one) for one in drawn(0.9, 0.41, 0.39)] == [False, False, True]


def test_the_threshold_moves_to_where_mistakes_cost_least() -> None:
    rule = Confidence(0.4)
    # Above 0.6 all were accepted, below it none.
    for probability, was_accepted in ((0.9, 1), (0.8, 1), (0.7, 1), (0.5, 0), (0.3, 0)):
        rule.observe(drawn(probability), was_accepted)
    assert rule.threshold == 0.4, "too few pairs"
    rule.observe(drawn(0.6), 1)
    assert rule.threshold == pytest.approx(0.6)


def test_tokens_behind_the_first_refused_one_teach_nothing() -> None:
    rule = Confidence(0.4)
    for _ in range(MIN_PAIRS):
        rule.observe(drawn(0.9, 0.5, 0.01, 0.01, 0.01), 1)
    # Had they counted as refused, they would be the cheapest to leave out.
    assert rule.threshold == pytest.approx(0.9)


def test_svip_stops_where_the_distribution_is_uncertain() -> None:
    rule = Svip()
    # sqrt(0.15 H) > 0.3 from H = 0.6 on.
    assert not rule.stops_after(Drawn(-3.0, 0.59))
    assert rule.stops_after(Drawn(0.0, 0.61))


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


def test_goodput_begins_new_requests_where_others_are_and_goes_on_trying() -> None:
    costs = DraftCosts()
    old = Goodput(costs)
    costs.note_draw(4.0)
    costs.note_verify(2.0)
    assert costs.verify_s == 2.0, "the first one counts whole"
    for _ in range(100):
        old.observe(drawn(0.5), 0)
    new = Goodput(costs)
    assert new.num_tokens(4, 1) == 0
    tries = [new.num_tokens(4, 1) for _ in range(400)]
    assert tries.index(1) > 0
    for _ in range(60):
        new.observe(drawn(0.5), 1)
    assert new.num_tokens(4, 1) > 1
    costs.note_draw(900.0, num_read=200)
    assert costs.draw_s == pytest.approx(0.4), "who reads a text takes longer"


def test_where_the_engine_weighs_drafts_goodput_leaves_none_out() -> None:
    costs = DraftCosts()
    rule = Goodput(costs)
    costs.note_engine_costs([Query("r", 1, 4, step_s=3.0)])
    costs.note_draw(90.0)
    assert [rule.num_tokens(most, 1) for most in (4, 1, 0)] == [1, 1, 0]
    costs.note_verify(2.0)
    assert costs.verify_s == pytest.approx(2.9)


@dataclass
class Draft:
    reach: float


def test_a_draw_is_made_for_as_many_tokens_as_save_its_time() -> None:
    """Of all requests together; as many texts go on as did so from the level before."""
    costs = DraftCosts()
    assert costs.depth().goes_on([Draft(0.0)]), "the engine said nothing"
    assert not costs.depth().goes_on([])
    for _ in range(200):
        costs.note_draw(2.0)
    costs.note_engine_costs([Query("r", 1, 4, token_s=10.0), Query("s", 1, 4)])
    least = 2.0 / (LEVEL_SHARE * 10.0)
    assert least == 0.25
    assert costs.depth().goes_on([Draft(0.51)])
    assert not costs.depth().goes_on([Draft(0.49)])
    # Of two texts half go on: of one of them half again.
    assert costs.depth().goes_on([Draft(0.6), Draft(0.2)])
    depth = costs.depth()
    assert depth.goes_on([Draft(math.inf)]), "nothing is drawn yet"
    assert depth.goes_on([Draft(0.6)])
    assert depth.goes_on([Draft(0.5)])
    assert not depth.goes_on([Draft(0.3)])
    costs.note_engine_costs([Query("r", 1, 4)])
    assert costs.depth().goes_on([Draft(0.0)])


class Seen(Constant):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def observe(self, draft: Sequence[Drawn], num_accepted: int) -> None:
        self.told.append((len(draft), num_accepted))


def test_of_a_tree_the_levels_of_its_path_count() -> None:
    rule = Seen()
    length = ChainLength(rule)
    for said, accepted in [([5, 8, 9], 2), ([4, 8], 1), ([6], 0), ([5, 7, 1, 1], 3), ([5], 1)]:
        assert length.begin(3, 1) == 3
        length.ends_with(5, drawn(0.5)[0])
        length.becomes([4, 5, 7, 8, 1], [ROOT, ROOT, 1, 1, 2])
        assert length.observe(said) == accepted
        assert rule.told.pop() == (3, accepted)
    length.begin(3, 1)
    length.becomes([], [])
    assert length.observe([4]) == 0
    # What nobody drafted is no draft.
    assert length.observe([4]) == 0
    assert rule.told == [(0, 0)]


def test_what_is_between_two_drafts_of_a_request_is_a_verification() -> None:
    rounds = DraftRounds()
    assert rounds.verify_s(["a"], 1.0) is None
    rounds.finished(["a", "b"], 2.0)
    assert rounds.verify_s(["b", "c"], 5.0) == 3.0
    # Others, and a text that went on by more than a step.
    assert rounds.verify_s(["c"], 5.0) is None
    assert rounds.verify_s([], 5.0) is None


def rules() -> list[Stopping]:
    return [
        Constant(),
        Heuristic(4, 8),
        Confidence(0.4),
        Svip(),
        Goodput(DraftCosts()),
    ]


@given(
    st.integers(0, 4),
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
