"""How many tokens a step without drafts decodes, and what that makes plain decoding worth."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.core.proposals import AskPlan, DraftBatch, chain_proposal
from draftline.core.schedule.budget import NodeBudget, StepOutcome
from draftline.core.schedule.multi_step import MOST_STEPS, MultiStep
from draftline.core.schedule.step_cost import StepCost
from draftline.core.tree.merge import merge
from draftline.core.tree.tree import NO_TREE, empty_trees
from draftline.core.verify.walk import Paths


@pytest.mark.parametrize(
    ("limit_s", "plain_s", "most", "expected"),
    [
        (0.01, 0.002, 50, 5),
        (0.01, 0.002, 3, 3),
        (0.01, 0.006, 50, 1),
        (0.01, 1e-6, 500, MOST_STEPS),
        (0.01, 0.002, 1, 1),
        (0.0, 0.002, 50, 1),
    ],
)
def test_a_step_lasts_no_longer_than_its_limit(
    limit_s: float, plain_s: float, most: int, expected: int
) -> None:
    assert MultiStep(limit_s).num_steps(1, plain_s, most) == expected


def test_it_follows_what_such_steps_take() -> None:
    multi = MultiStep(0.01)
    assert multi.round_s(3, 0.002) == 0.002
    multi.record(3, 4, 0.004)
    assert multi.round_s(3, 0.002) == pytest.approx(0.001)
    assert multi.num_steps(3, 0.002, 50) == 10
    # Other numbers of requests are not known yet.
    assert multi.num_steps(5, 0.002, 50) == 5
    for _ in range(100):
        multi.record(3, 4, 0.016)
    # A single token each never takes longer than a round of one.
    assert multi.round_s(3, 0.002) == 0.002


def test_nothing_is_decoded_ahead_where_the_stage_cannot() -> None:
    possible = False
    multi = MultiStep(0.01, lambda: possible)
    multi.record(1, 5, 0.005)
    assert multi.num_steps(1, 0.002, 50) == 1
    assert multi.round_s(1, 0.002) == 0.002
    possible = True
    assert multi.num_steps(1, 0.002, 50) == 10


def outcome_of(num_steps: int) -> StepOutcome:
    batch = DraftBatch({}, 0.0, 0.0, AskPlan({}, {}), {})
    outcome = StepOutcome(1, 0.0, 0, batch, num_steps)
    outcome.count(["a"], [NO_TREE], empty_trees(1), Paths.of([[(0, 5, -1)] * num_steps]))
    return outcome


def test_drafts_are_weighed_against_plain_decoding_of_several_tokens() -> None:
    """A node that is worth a round of one token is not worth one that decodes ten."""
    budget = NodeBudget(StepCost([1, 2], [0.002, 0.0021]), multi_step=MultiStep(0.01))
    proposal = chain_proposal("any", np.arange(1, dtype=np.int32))
    tree = merge([proposal], 1, 1, budget.table)
    assert len(budget.choose([tree], [1], 0).nodes) == 1
    now = 0.0
    for _ in range(30):
        now += 0.004
        budget.note_step(outcome_of(10), now)
    assert budget.num_decode_steps(1, 50) == 25
    assert len(budget.choose([tree], [1], 0).nodes) == 0
    # Beside prompts, and where logits are changed, every request gets a token a step.
    assert len(budget.choose([tree], [1], 0, may_decode_several=False).nodes) == 1
    assert len(budget.choose([tree], [1], 1).nodes) == 1


def test_rounds_of_several_tokens_do_not_change_what_rows_cost() -> None:
    budget = NodeBudget(StepCost([1, 2], [0.002, 0.0021]), multi_step=MultiStep(0.01))
    before = budget.cost.curve(1).tolist()
    budget.note_step(outcome_of(10), 0.004)
    assert budget.cost.curve(1).tolist() == before
