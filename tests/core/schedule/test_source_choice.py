"""A drafter is asked for as long as it brings more than it takes."""

from __future__ import annotations

import numpy as np
from draftline.core.proposals import chain_proposal
from draftline.core.schedule.budget import (
    RETRY_EVERY,
    RETRY_STEPS,
    TRIAL_STEPS,
    SourceChoice,
)
from draftline.core.tree.acceptance_table import AcceptanceTable
from draftline.core.tree.merge import merge
from draftline.core.tree.tree import attribute

COSTS = {"cheap": 0.001, "dear": 0.010}


def run(choice: SourceChoice, steps: int, accepted: dict[str, int]) -> list[frozenset[str]]:
    """What was left out in each of the steps, where an accepted token saves 5 ms."""
    history = []
    for _ in range(steps):
        left_out = choice.left_out(COSTS, 0.005)
        asked = set(COSTS) - left_out
        choice.learn(COSTS, asked, {name: accepted[name] for name in asked})
        history.append(left_out)
    return history


def test_everyone_gets_a_trial_and_the_useless_one_is_left_out() -> None:
    history = run(SourceChoice(), 60, {"cheap": 1, "dear": 1})
    assert history[:TRIAL_STEPS] == [frozenset()] * TRIAL_STEPS
    assert set(history[TRIAL_STEPS:]) == {frozenset({"dear"})}


def test_a_drafter_that_pays_stays() -> None:
    assert set(run(SourceChoice(), 60, {"cheap": 1, "dear": 3})) == {frozenset()}


def test_whoever_was_left_out_is_tried_again_and_comes_back() -> None:
    choice = SourceChoice()
    history = run(choice, TRIAL_STEPS + RETRY_EVERY + RETRY_STEPS + 1, {"cheap": 1, "dear": 0})
    tried = [not left_out for left_out in history[TRIAL_STEPS:]]
    assert tried == [False] * RETRY_EVERY + [True] * RETRY_STEPS + [False]
    later = run(choice, 3 * RETRY_EVERY, {"cheap": 1, "dear": 9})
    assert later[-1] == frozenset()


def test_a_free_drafter_is_never_left_out() -> None:
    choice = SourceChoice()
    for _ in range(100):
        assert choice.left_out({"free": 0.0}, 0.005) == frozenset()
        choice.learn({"free": 0.0}, {"free"}, {})


def test_a_node_of_two_drafters_is_credited_to_the_cheaper() -> None:
    tokens = np.array([1, 2], dtype=np.int32)
    both = [chain_proposal(name, tokens) for name in ("dear", "cheap")]
    longer = chain_proposal("dear", np.array([1, 2, 3], dtype=np.int32))
    tree = merge([*both, longer], 9, 9, AcceptanceTable())
    costs = np.array([COSTS[name] for name in tree.names])
    credits = attribute([tree], [range(4)], costs)
    assert dict(zip(tree.names, credits, strict=True)) == {"cheap": 2, "dear": 1}
