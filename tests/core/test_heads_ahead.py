"""Drafts of heads of the last stage: told a step ahead, taken by the next one."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from draftline.core.errors import RequestFailed
from draftline.core.proposals import DraftCost, chain_proposal
from draftline.core.speculation import draft_plan
from draftline.core.speculation.draft_plan import DraftBatch, DraftPlan, PlannedRequest, StepOutcome
from draftline.core.speculation.policy import SpeculationPolicy
from draftline.core.speculation.step_cost import StepCost
from draftline.core.steps import EVERY_LENGTH_BUCKET, HeadTask, length_bucket_of
from draftline.core.tree.merge import merge
from draftline.core.tree.tree import TreeBatch, empty_trees
from draftline.core.verify.walk import Paths
from hypothesis import given
from hypothesis import strategies as st
from support.fakes.fake_bench import Bench


@given(
    seed=st.integers(0, 2**20), num_blocks=st.sampled_from([9, 16, 64]), probes=st.booleans(),
    rows=st.sampled_from([16, 40]), num_groups=st.integers(1, 2),
)  # fmt: skip
def test_heads_read_what_is_committed_and_their_drafts_fit(
    seed: int, num_blocks: int, probes: bool, rows: int, num_groups: int
) -> None:
    """Through trees, probes, chunked prompts, shared prefixes and preemption."""
    bench = Bench(
        num_blocks=num_blocks, rows=rows, seed=seed, probes=probes, heads=True,
        is_adaptive=False, num_groups=num_groups,
    )  # fmt: skip
    asyncio.run(bench.run_three(seed))
    assert bench.drafters.num_taken > 3
    assert bench.target.num_behind > 20
    bench.check_empty()


@given(seed=st.integers(0, 2**20), length_buckets=st.sampled_from([0b001, 0b010, 0b100, 0b110]))
def test_heads_draft_only_behind_the_outcomes_that_they_are_told(
    seed: int, length_buckets: int
) -> None:
    """Stage and engine agree about which these are: each draft fits its text."""
    bench = Bench(num_blocks=64, seed=seed, heads=True, is_adaptive=False)
    with patch.object(draft_plan, "EVERY_LENGTH_BUCKET", length_buckets):
        asyncio.run(bench.run_three(seed))
    told = [step.heads.tasks[0] for step in bench.target.steps]
    num_asked = sum(sum(size > 0 for size in task.max_nodes) for task in told)
    assert all(
        {one & EVERY_LENGTH_BUCKET for one in task.length_buckets}
        <= {length_buckets, EVERY_LENGTH_BUCKET}
        for task in told
    )
    assert 0 < bench.drafters.num_drafted <= num_asked
    # Where a step has no nodes of a request, none can be accepted.
    bare = [
        task.length_buckets[place]
        for step in bench.target.steps
        for task in step.heads.tasks
        for place, one in enumerate(task.requests)
        if (tree := step.trees[one]) is not None and len(tree.slots) == 1
    ]
    assert all(buckets & 1 for buckets in bare)
    bench.check_empty()


def test_a_head_that_is_told_to_wait_for_failures_drafts_less() -> None:
    """Its drafts are right, and so none follows behind them."""
    bench = Bench(heads=True, is_adaptive=False)
    del bench.drafters.drafter_costs["first"], bench.drafters.drafter_costs["second"]
    bench.add("a", [1, 2, 3], 13)
    with patch.object(draft_plan, "EVERY_LENGTH_BUCKET", 0b001):
        asyncio.run(bench.run())
    assert 0 < bench.drafters.num_drafted < len(bench.target.steps) - 1


def test_a_task_is_cut_to_the_outcomes_of_its_trees() -> None:
    """Place 0 accepted nothing, place 1 five nodes; place 2 is a prompt."""
    task = HeadTask("head", (0, 1, 2), (8, 9, 7), (0b100, 0b101, 0b001))
    assert task.after([0, 5]) == HeadTask("head", (1, 2), (9, 7), (0b101, 0b001))
    assert task.after([4, 0]) == task
    assert task._replace(level_tokens=0.5).after([0, 5]).level_tokens == 0.5
    assert [length_bucket_of(count) for count in (0, 1, 3, 4, 60)] == [0, 1, 1, 2, 2]


def test_drafts_are_right_and_accepted_from_the_first_token_on() -> None:
    bench = Bench(heads=True, is_adaptive=False)
    del bench.drafters.drafter_costs["first"], bench.drafters.drafter_costs["second"]
    bench.add("a", [1, 2, 3], 13)
    asyncio.run(bench.run())
    # The prompt's step, then three drafts and a bonus token a step.
    assert len(bench.target.steps) == 1 + 3
    assert bench.drafters.num_drafted == len(bench.target.steps)


def test_a_request_without_drafts_has_no_task() -> None:
    bench = Bench(heads=True, is_adaptive=False)
    bench.add("a", [1, 2, 3], 9, speculative=False)
    asyncio.run(bench.run())
    assert all(task.requests == () for step in bench.target.steps for task in step.heads.tasks)


def test_a_chunk_that_is_not_the_last_is_read_and_not_drafted_behind() -> None:
    bench = Bench(heads=True, is_adaptive=False, rows=8)
    bench.add("a", [*range(6)] * 4, 5)
    asyncio.run(bench.run())
    tasks = [step.heads.tasks[0] for step in bench.target.steps]
    assert [task.max_nodes for task in tasks[:3]] == [(0,), (0,), tasks[2].max_nodes]
    assert tasks[2].max_nodes[0] > 0
    first = bench.target.steps[0]
    assert first.heads.following_tokens is not None
    assert first.heads.following_tokens.tolist() == [8 % 6]
    assert bench.target.steps[2].heads.following_tokens.tolist() == [-1]


def test_steps_of_several_tokens_come_where_nobody_wants_drafts() -> None:
    bench = Bench(heads=True, multi_step_s=100.0)
    bench.drafters.drafter_costs = {"ahead": bench.drafters.drafter_costs["ahead"]}
    bench.add("a", [1, 2, 3], 30, speculative=False)
    asyncio.run(bench.run())
    assert any(step.multi_step is not None for step in bench.target.steps)


@given(seed=st.integers(0, 2**20))
def test_a_budget_that_chooses_learns_that_a_head_pays(seed: int) -> None:
    """What its drafts brought counts for the plan that ordered them."""
    bench = Bench(heads=True, seed=seed, num_blocks=512, nodes=4)
    bench.drafters.drafter_costs = {"ahead": bench.drafters.drafter_costs["ahead"]}
    for name in "abcdef":
        bench.add(name, [1, 2, 3, len(name)], 60)
    asyncio.run(bench.run())
    late = bench.target.steps[len(bench.target.steps) // 2 :]
    ordered = [len(step.heads.tasks[0].requests) / len(step.trees) for step in late]
    assert np.mean(ordered) > 0.8
    assert bench.drafters.num_taken > 30


def test_heads_are_told_what_a_further_level_takes() -> None:
    """In tokens that would save as much, also behind the prompts of later requests."""
    bench = Bench(heads=True, num_blocks=512, nodes=4)
    ahead = replace(bench.drafters.drafter_costs["ahead"], level_s=0.25)
    bench.drafters.drafter_costs = {"ahead": ahead}
    bench.add("a", [1, 2, 3], 20)
    asyncio.run(bench.run())
    bench.add("b", [1, 2, 3, 4], 20)
    asyncio.run(bench.run())
    tasks = [step.heads.tasks[0] for step in bench.target.steps if step.heads.tasks]
    # A round of the bench takes a second.
    assert min(task.level_tokens for task in tasks if task.requests) >= 0.25


def test_a_stage_that_walked_another_way_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """Its drafts would stand behind another text than the coordinator's."""
    bench = Bench(heads=True, is_adaptive=False)
    bench.target.num_rows_astray = 1
    bench.add("a", [1, 2, 3], 13)
    with caplog.at_level(logging.ERROR):
        asyncio.run(bench.run())
    assert isinstance(bench.heard["a"][-1], RequestFailed)
    assert "step/heads.py" in caplog.text
    assert "AssertionError" in caplog.text
    # Nothing was walked with the prompt.
    assert len(bench.target.steps) == 2


HEADS = {"head": DraftCost(0.0, 0.1, is_ahead=True)}


def plan_of(policy: SpeculationPolicy, num_accepted: int, *, drafted: bool = True) -> DraftPlan:
    wish = PlannedRequest("r", 0.0, None, 100, 100, num_accepted, drafted)
    return policy.plan([wish], HEADS, 0)


def test_a_head_is_asked_for_what_the_plan_before_told_it_to_draft() -> None:
    """A new head drafts from the step after its first plan on, after every accepted length that the
    step may have: without drafts it accepts none."""
    policy = SpeculationPolicy(StepCost([1, 64], [1.0, 1.2]))
    first = plan_of(policy, 0)
    assert not first.by_drafter
    assert first.heads == {"head": {"r": 1 << length_bucket_of(0)}}
    second = plan_of(policy, 0)
    assert second.by_drafter == {"head": ("r",)}
    assert second.heads == {"head": {"r": EVERY_LENGTH_BUCKET}}
    assert second.head_counts["head"] == pytest.approx(1.0)
    assert plan_of(policy, 5).by_drafter == {"head": ("r",)}
    assert not plan_of(policy, 5, drafted=False).by_drafter, "the text came to another leaf"


def test_most_steps_go_without_a_plan_where_a_head_does_not_pay() -> None:
    """It was tried behind steps that accepted nothing, the only ones that there are."""
    policy = SpeculationPolicy(StepCost([1, 64], [1.0, 1.2]))
    costs = {"head": DraftCost(0.0, 0.9, is_ahead=True)}
    num_planned = 0
    for step in range(200):
        plan = DraftPlan({})
        if not policy.is_backed_off(["r"]):
            num_planned += 1
            wish = PlannedRequest("r", 0.0, None, 100, 100)
            plan = policy.plan([wish], costs, 0)
        outcome = StepOutcome(1, 1.0, 0, DraftBatch({}, 0.0, 0.0, plan, costs))
        trees = [empty_trees(1)[0]]
        outcome.count(["r"], trees, TreeBatch.of(trees), Paths.of([[(0, 1, -1)]]))
        policy.update(outcome, 1.0 + step)
    assert num_planned < 0.2 * 200


def test_many_requests_do_not_explore_a_head_for_nothing() -> None:
    """All that it takes is shared, so that one request more seems to take nothing."""
    policy = SpeculationPolicy(StepCost([1, 64], [1.0, 1.2]))
    costs = {"head": DraftCost(0.9, 0.0, is_ahead=True)}
    ids = [str(number) for number in range(32)]
    num_asked = 0
    for step in range(300):
        wishes = [PlannedRequest(one, 0.0, None, 100, 100) for one in ids]
        plan = DraftPlan({})
        if not policy.is_backed_off(ids):
            plan = policy.plan(wishes, costs, 0)
        num_asked += bool(plan.by_drafter)
        outcome = StepOutcome(32, 1.1, 0, DraftBatch({}, 0.0, 0.0, plan, costs))
        trees = [empty_trees(1)[0]] * 32
        outcome.count(ids, trees, TreeBatch.of(trees), Paths.of([[(0, 1, -1)]] * 32))
        policy.update(outcome, 1.1 * (1 + step))
    assert 0 < num_asked < 0.1 * 300


def test_a_head_drafts_only_after_accepted_lengths_after_which_it_pays() -> None:
    """It brings three tokens after steps that accepted nothing, and none after others."""
    policy = SpeculationPolicy(StepCost([1, 64], [1.0, 1.2]))
    right = np.arange(1, 4, dtype=np.int32)
    tree = merge([chain_proposal("head", right)], 4, 4, policy.table)
    num_accepted, told = 0, []
    for step in range(400):
        plan = plan_of(policy, num_accepted)
        told.append(plan.heads.get("head", {}).get("r", 0))
        path, trees = [(0, 1, -1)], [empty_trees(1)[0]]
        if "head" in plan.by_drafter:
            trees = [tree]
            if not num_accepted:
                path = [(0, 1, 0), (1, 2, 1), (2, 3, 2), (3, 9, -1)]
        outcome = StepOutcome(4, 1.0, 0, DraftBatch({}, 0.0, 0.0, plan, HEADS))
        outcome.count(["r"], trees, TreeBatch.of(trees), Paths.of([path]))
        policy.update(outcome, 1.0 + step)
        num_accepted = len(path) - 1
    late = told[200:]
    assert all(length_buckets & 0b001 for length_buckets in late)
    assert sum(length_buckets >> 1 & 1 for length_buckets in late) < 0.2 * len(late)
