"""What a drafter is taken to cost, from the seconds of its answers."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.cluster.drafting.replies import FIRST_ANSWER_S, CostMeter
from draftline.core.proposals import DraftRequest


def measured(*answers: tuple[int, float]) -> CostMeter:
    meter = CostMeter()
    for num_queries, seconds in answers:
        meter.record([], num_queries, seconds)
    return meter


def test_messages_and_queries_are_told_apart() -> None:
    cost = measured(*[(count, 0.001 + 0.0002 * count) for count in (1, 32, 4, 16, 8, 24)]).cost()
    assert cost.message_s == pytest.approx(0.001, rel=0.2)
    assert cost.query_s == pytest.approx(0.0002, rel=0.2)


def test_levels_are_told_from_what_a_draft_takes_anyway() -> None:
    meter = CostMeter()
    for num_levels in (5, 5, 2, 4, 1, 5, 3, 1):
        meter.record([], 1, 0.002 + 0.001 * num_levels, num_levels=num_levels)
    assert meter.cost().level_s == pytest.approx(0.001, rel=0.2)
    meter.record([], 1, 5.0, num_levels=3)
    assert meter.cost().level_s < 0.01, "a pause of the machine"


def test_each_level_takes_a_part_where_drafts_are_equally_deep() -> None:
    meter = CostMeter()
    for _ in range(5):
        meter.record([], 1, 0.006, num_levels=6)
    assert meter.cost().level_s == pytest.approx(0.001)
    assert measured(*[(1, 0.006)] * 5).cost().level_s == 0.0


def test_a_first_answer_that_waited_for_something_is_not_believed() -> None:
    assert measured((1, 0.4)).cost().message_s == FIRST_ANSWER_S
    cost = measured((1, 0.4), (1, 0.001)).cost()
    assert cost.message_s + cost.query_s == pytest.approx(0.001)
    cost = measured((1, 0.4), (1, 0.4)).cost()
    assert cost.message_s + cost.query_s == pytest.approx(0.4), "it is as slow as that"


def test_a_pause_of_the_machine_moves_a_price_a_little() -> None:
    steady = measured(*[(1, 0.001)] * 20)
    before = steady.cost()
    steady.record([], 1, 1.0)
    after = steady.cost()
    assert after.message_s + after.query_s < 1.5 * (before.message_s + before.query_s)


def test_openings_are_told_from_what_messages_take() -> None:
    meter = measured(*[(1, 0.001)] * 5)
    request = DraftRequest("r", np.zeros(100, dtype=np.int32), 100, 0.0, 0)
    meter.record([request], 1, 0.003)
    assert meter.cost().open_token_s == pytest.approx(2e-5)
