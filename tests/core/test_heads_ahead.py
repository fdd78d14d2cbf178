"""Drafts of heads of the last stage: told a step ahead, taken by the next one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from draftline.core.arrays import Int64
from draftline.core.errors import RequestFailed
from draftline.core.reach import EVERY_REACH, reach_of
from draftline.core.schedule.choice import wishes
from draftline.core.schedule.choice.draft_orders import exchange, expected_counts
from draftline.core.schedule.choice.kernels import ASKED, LEFT_OUT, TRIED, StepWishes
from draftline.core.schedule.choice.known import nothing_known
from draftline.core.steps import HeadTask
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


@given(seed=st.integers(0, 2**20), reaches=st.sampled_from([0b001, 0b010, 0b100, 0b110]))
def test_heads_draft_only_behind_the_outcomes_that_they_are_told(seed: int, reaches: int) -> None:
    """Stage and engine agree about which these are: each draft fits its text."""
    bench = Bench(num_blocks=64, seed=seed, heads=True, is_adaptive=False)
    with patch.object(wishes, "EVERY_REACH", reaches):
        asyncio.run(bench.run_three(seed))
    told = [step.head_tasks[0] for step in bench.target.steps]
    num_asked = sum(sum(size > 0 for size in task.max_nodes) for task in told)
    assert all(
        {one & EVERY_REACH for one in task.reaches} <= {reaches, EVERY_REACH} for task in told
    )
    assert 0 < bench.drafters.num_drafted <= num_asked
    bench.check_empty()


def test_a_head_that_is_told_to_wait_for_failures_drafts_less() -> None:
    """Its drafts are right, and so none follows behind them."""
    bench = Bench(heads=True, is_adaptive=False)
    del bench.drafters.drafter_costs["first"], bench.drafters.drafter_costs["second"]
    bench.add("a", [1, 2, 3], 13)
    with patch.object(wishes, "EVERY_REACH", 0b001):
        asyncio.run(bench.run())
    assert 0 < bench.drafters.num_drafted < len(bench.target.steps) - 1


def test_a_task_is_cut_to_the_outcomes_of_its_trees() -> None:
    """Place 0 accepted nothing, place 1 five nodes; place 2 is a prompt."""
    task = HeadTask("head", (0, 1, 2), (8, 9, 7), (0b100, 0b101, 0b001))
    assert task.after([0, 5]) == HeadTask("head", (1, 2), (9, 7), (0b101, 0b001))
    assert task.after([4, 0]) == task
    assert task._replace(level_tokens=0.5).after([0, 5]).level_tokens == 0.5
    assert [reach_of(count) for count in (0, 1, 3, 4, 60)] == [0, 1, 1, 2, 2]


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
    assert all(task.places == () for step in bench.target.steps for task in step.head_tasks)


def test_a_chunk_that_is_not_the_last_is_read_and_not_drafted_behind() -> None:
    bench = Bench(heads=True, is_adaptive=False, rows=8)
    bench.add("a", [*range(6)] * 4, 5)
    asyncio.run(bench.run())
    tasks = [step.head_tasks[0] for step in bench.target.steps]
    assert [task.max_nodes for task in tasks[:3]] == [(0,), (0,), tasks[2].max_nodes]
    assert tasks[2].max_nodes[0] > 0
    first = bench.target.steps[0]
    assert first.following_tokens is not None
    assert first.following_tokens.tolist() == [8 % 6]
    assert bench.target.steps[2].following_tokens.tolist() == [-1]


def test_steps_of_several_tokens_come_where_nobody_wants_drafts() -> None:
    bench = Bench(heads=True, multi_step_s=100.0)
    bench.drafters.drafter_costs = {"ahead": bench.drafters.drafter_costs["ahead"]}
    bench.add("a", [1, 2, 3], 30, speculative=False)
    asyncio.run(bench.run())
    assert any(step.num_decode_steps > 1 for step in bench.target.steps)


@given(seed=st.integers(0, 2**20))
def test_a_budget_that_chooses_learns_that_a_head_pays(seed: int) -> None:
    """What its drafts brought counts for the plan that ordered them."""
    bench = Bench(heads=True, seed=seed, num_blocks=512, nodes=4)
    bench.drafters.drafter_costs = {"ahead": bench.drafters.drafter_costs["ahead"]}
    for name in "abcdef":
        bench.add(name, [1, 2, 3, len(name)], 60)
    asyncio.run(bench.run())
    late = bench.target.steps[len(bench.target.steps) // 2 :]
    ordered = [len(step.head_tasks[0].places) / len(step.trees) for step in late]
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
    tasks = [step.head_tasks[0] for step in bench.target.steps if step.head_tasks]
    # A round of the bench takes a second.
    assert min(task.level_tokens for task in tasks if task.places) >= 0.25


def test_a_stage_that_walked_another_way_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """Its drafts would stand behind another text than the coordinator's."""
    bench = Bench(heads=True, is_adaptive=False)
    bench.target.num_rows_astray = 1
    bench.add("a", [1, 2, 3], 13)
    with caplog.at_level(logging.ERROR):
        asyncio.run(bench.run())
    assert isinstance(bench.heard["a"][-1], RequestFailed)
    assert "step/head_drafts.py" in caplog.text
    assert "AssertionError" in caplog.text
    # Nothing was walked with the prompt.
    assert len(bench.target.steps) == 2


def wishes_of(reached: Sequence[int], *, is_undrafted: bool = False) -> StepWishes:
    """Of requests in the first rows, and two drafters of which the second drafts ahead."""
    count = len(reached)
    nothing = np.zeros(2)
    return StepWishes(
        rows=np.arange(count),
        allowed=np.ones((count, 2), dtype=np.bool_),
        sizes=np.ones((count, 3)),
        grid=np.array([0.0, 1e6]),
        curve_s=nothing,
        base_rows=0.0,
        token_s=0.0,
        plain_s=0.0,
        cells=np.array(reached),
        most_s=0.0,
        host_s=nothing,
        single_s=0.0,
        round_s=0.0,
        is_new=np.zeros(2, dtype=np.bool_),
        is_ahead=np.array([False, True]),
        is_undrafted=np.full(count, is_undrafted),
        turn=0,
    )


def orders(*second: int) -> Int64:
    """int64 [requests, 2]: of the drafter that drafts ahead."""
    return np.array([[0, one] for one in second])


def test_orders_come_a_step_later() -> None:
    """And only after such outcomes as they were made for."""
    known = nothing_known()
    known = known._replace(ordered=np.zeros((64, 2), np.int64), ordered_after=orders(*[0] * 64))
    known.ordered[1, 1], known.ordered_after[1, 1] = ASKED, EVERY_REACH
    choices = np.array([[ASKED, LEFT_OUT], [ASKED, ASKED + TRIED]])
    forced, paying = orders(0, EVERY_REACH), orders(0b101, 0)
    told = exchange(choices, forced, paying, known, wishes_of([0, 0]))
    assert told.tolist() == orders(0b101, EVERY_REACH).tolist()
    # Nothing was ordered for the first one; for the second, at its opening.
    assert choices.tolist() == [[ASKED, LEFT_OUT], [ASKED, ASKED]]
    nothing, choices = orders(0, 0), orders(0, 0)
    exchange(choices, nothing, nothing, known, wishes_of([1, 2]))
    # The first one's were for another outcome.
    assert choices.tolist() == orders(LEFT_OUT, ASKED + TRIED).tolist()
    exchange(choices, nothing, nothing, known, wishes_of([0, 0]))
    assert not choices.any()


def test_what_was_ordered_is_not_there_where_heads_were_told_not_to_draft() -> None:
    known = nothing_known()
    known = known._replace(ordered=np.zeros((64, 2), np.int64), ordered_after=orders(*[0] * 64))
    paying, nothing = orders(0b001, 0b001), orders(0, 0)
    told = exchange(orders(0, 0), nothing, paying, known, wishes_of([0, 2]))
    assert told.tolist() == paying.tolist()
    # Of three outcomes that were seen once each, and those of two steps.
    assert expected_counts(told, known)[1] == pytest.approx(2 * 2 / 5, abs=0.01)
    for is_undrafted, found in ((True, LEFT_OUT), (False, ASKED)):
        choices = orders(0, 0)
        exchange(choices, nothing, paying, known, wishes_of([0, 2], is_undrafted=is_undrafted))
        assert choices.tolist() == orders(found, LEFT_OUT).tolist()
