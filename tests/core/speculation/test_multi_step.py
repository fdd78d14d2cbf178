"""How many tokens a step without drafts decodes, and what that makes plain decoding worth."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.core.proposals import DraftCost, chain_proposal
from draftline.core.speculation.draft_plan import DraftBatch, DraftPlan, PlannedRequest, StepOutcome
from draftline.core.speculation.multi_step import MOST_STEPS, MultiStep
from draftline.core.speculation.policy import SpeculationPolicy
from draftline.core.speculation.step_cost import StepCost
from draftline.core.tree.merge import merge
from draftline.core.tree.tree import NO_TREE, TreeBatch, empty_trees
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
    assert MultiStep(limit_s).num_steps(1, StepCost([1], [plain_s]), most) == expected


def test_it_follows_what_such_steps_take() -> None:
    multi, cost = MultiStep(0.01), StepCost([1], [0.002])
    assert multi.round_s(3, cost) == pytest.approx(0.002)
    multi.record(3, 4, 0.004, cost)
    assert multi.round_s(3, cost) == pytest.approx(0.001)
    assert multi.num_steps(3, cost, 50) == 10
    for _ in range(100):
        multi.record(3, 4, 0.016, cost)
    # A single token each never takes longer than a round of one.
    assert multi.round_s(3, cost) == pytest.approx(0.002)


def test_numbers_of_requests_that_were_not_seen_follow_those_that_were() -> None:
    """Rounds of one token take 9 ms beside the pass; 5 requests only ever had such."""
    multi, cost = MultiStep(0.1), StepCost([1, 8], [0.002, 0.009])
    for _ in range(100):
        for num_requests in (2, 5, 6):
            cost.record(num_requests, num_requests, 0.010 + 0.001 * num_requests)
    assert multi.round_s(5, cost) == pytest.approx(0.006), "the pass alone, until one was seen"
    multi.record(2, 10, 0.050, cost)
    assert multi.round_s(2, cost) == pytest.approx(0.005)
    # A request takes 1 ms more than the pass says.
    assert multi.round_s(5, cost) == pytest.approx(0.011)
    assert multi.num_steps(5, cost, 50) == 9
    multi.record(5, 5, 0.040, cost)
    assert multi.round_s(5, cost) == pytest.approx(0.008)


def test_chance_does_not_end_steps_of_several_near_the_limit() -> None:
    multi, cost = MultiStep(0.02), StepCost([1], [0.03])
    multi.record(1, 2, 0.021, cost)
    assert multi.num_steps(1, cost, 50) == 1, "none yet, and two are too long"
    multi.record(1, 2, 0.002, cost)
    assert multi.num_steps(1, cost, 50) == 2
    for _ in range(100):
        multi.record(1, 2, 0.024, cost)
    assert multi.num_steps(1, cost, 50) == 2
    assert multi.round_s(1, cost) == pytest.approx(0.012, rel=0.01)
    for _ in range(100):
        multi.record(1, 2, 0.026, cost)
    assert multi.num_steps(1, cost, 50) == 1
    assert multi.round_s(1, cost) == pytest.approx(0.03)
    for _ in range(100):
        multi.record(1, 2, 0.021, cost)
    assert multi.num_steps(1, cost, 50) == 1, "it begins again where two fit"


def test_nothing_is_decoded_ahead_where_the_stage_cannot() -> None:
    possible = False
    multi, cost = MultiStep(0.01, lambda: possible), StepCost([1], [0.002])
    multi.record(1, 5, 0.005, cost)
    assert multi.num_steps(1, cost, 50) == 1
    assert multi.round_s(1, cost) == pytest.approx(0.002)
    possible = True
    assert multi.num_steps(1, cost, 50) == 10


def outcome_of(num_steps: int, began_at: float = 0.0) -> StepOutcome:
    batch = DraftBatch({}, began_at, 0.0, DraftPlan({}), {})
    outcome = StepOutcome(1, 0.0, 0, batch, num_steps)
    outcome.count(["a"], [NO_TREE], empty_trees(1), Paths.of([[(0, 5, -1)] * num_steps]))
    return outcome


def test_drafts_are_weighed_against_plain_decoding_of_several_tokens() -> None:
    """A node that is worth a round of one token is not worth one that decodes ten."""
    policy = SpeculationPolicy(StepCost([1, 2], [0.002, 0.0021]), multi_step=MultiStep(0.01))
    proposal = chain_proposal("any", np.arange(1, dtype=np.int32))
    tree = merge([proposal], 1, 1, policy.table)
    assert len(policy.select([tree], [1], 0).nodes) == 1
    now = 0.0
    for _ in range(30):
        now += 0.004
        policy.update(outcome_of(10), now)
    assert policy.num_decode_steps(1, 50, drafters_asked=True) == 25
    assert len(policy.select([tree], [1], 0).nodes) == 0
    # Beside prompts, and where logits are changed, every request gets a token a step.
    assert len(policy.select([tree], [1], 0, may_decode_several=False).nodes) == 1
    assert len(policy.select([tree], [1], 1).nodes) == 1


def test_drafters_of_full_trees_are_asked_for_every_token() -> None:
    policy = SpeculationPolicy(
        StepCost([1, 2], [0.002, 0.0021]), is_adaptive=False, multi_step=MultiStep(0.01)
    )
    assert policy.num_decode_steps(1, 50, drafters_asked=True) == 1
    # A request that takes no drafts.
    assert policy.num_decode_steps(1, 50, drafters_asked=False) == 5


def test_rounds_of_several_tokens_do_not_change_what_rows_cost() -> None:
    policy = SpeculationPolicy(StepCost([1, 2], [0.002, 0.0021]), multi_step=MultiStep(0.01))
    before = policy.cost.curve(1).tolist()
    policy.update(outcome_of(10), 0.004)
    assert policy.cost.curve(1).tolist() == before


def test_a_round_of_one_token_takes_no_less_than_a_token_of_several() -> None:
    """The curve is of an idle pipeline and short contexts; steps must keep their limit beyond."""
    policy = SpeculationPolicy(StepCost([1, 2], [0.002, 0.0021]), multi_step=MultiStep(0.02))
    assert policy.num_decode_steps(1, 50, drafters_asked=True) == 10
    now = 0.0
    for _ in range(60):
        outcome, now = outcome_of(10, now), now + 0.045
        policy.update(outcome, now)
    # 4.5 ms a token; rounds that take very much longer than expected are believed in part.
    assert policy.num_decode_steps(1, 50, drafters_asked=True) == 4
    assert policy.cost.seconds(1, 1) == pytest.approx(0.0045, rel=0.1)


def test_a_drafter_is_tried_for_shorter_where_its_step_decodes_one_token() -> None:
    """Every other draft is right. It would pay for the drafter, and does not for the rest of a
    step of one token."""
    assert num_tried(0.0) > 60
    assert 0 < num_tried(0.04) < 40


def num_tried(limit_s: float) -> int:
    """Of 400 rounds those that ask a drafter of 3 ms; a pass takes 5 ms, what lies between 2."""
    policy = SpeculationPolicy(StepCost([1, 8], [0.005, 0.012]), multi_step=MultiStep(limit_s))
    tree = merge([chain_proposal("any", np.arange(1, dtype=np.int32))], 1, 1, policy.table)
    costs, now, found = {"any": DraftCost(0.0, 0.003)}, 0.0, 0
    for step in range(400):
        plan = policy.plan([PlannedRequest("r", 0.0, None, 100, 100)], costs, 0)
        if plan.by_drafter:
            found += 1
            took_s, path = 0.011, [(0, 0, 0), (1, 1, -1)] if step % 2 else [(0, 1, -1)]
            outcome = StepOutcome(2, took_s, 0, DraftBatch({}, now, 0.003, plan, costs))
            outcome.count(["r"], [tree], TreeBatch.of([tree]), Paths.of([path]))
        else:
            outcome = outcome_of(policy.num_decode_steps(1, 8, drafters_asked=True))
            took_s = 0.002 + 0.005 * outcome.num_passes
        now += took_s
        policy.update(outcome, now)
    return found
