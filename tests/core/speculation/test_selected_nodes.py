"""Nodes are bought where they are worth their time, and none where nothing is."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from draftline.core.arrays import ROOT
from draftline.core.proposals import Proposal
from draftline.core.request.output import Delta
from draftline.core.speculation.policy import SpeculationPolicy
from draftline.core.speculation.step_cost import StepCost
from draftline.core.tree.acceptance import AcceptanceTable
from draftline.core.tree.merge import merge
from draftline.core.tree.tree import TokenTree
from hypothesis import given
from hypothesis import strategies as st
from support.fakes.fake_bench import Bench
from support.fakes.fake_target import plain_answer

FLAT = ([1], [1.0])
LINEAR = ([1, 2], [1.0, 2.0])
# Two rows for the price of one, as where a pass is bound by reading the weights.
WIDE = ([1, 64, 65], [1.0, 1.0, 2.0])


def proposal(
    source: str, tokens: list[int], parents: list[int], log_probs: list[float]
) -> Proposal:
    return Proposal(
        source,
        np.array(tokens, dtype=np.int32),
        np.array(parents, dtype=np.int32),
        np.array(log_probs, dtype=np.float32),
    )


def chain(source: str, length: int) -> Proposal:
    return proposal(source, list(range(length)), list(range(-1, length - 1)), [0.0] * length)


def trained_table(rates: dict[str, float], count: int = 400) -> AcceptanceTable:
    table = AcceptanceTable()
    for source, rate in rates.items():
        for depth in range(1, 10):
            for index in range(count):
                accepted = (index * 7919) % count < rate * count
                table.record(source, 0.0, depth, 0, accepted=accepted)
    return table


def policy_of(curve: tuple[list[int], list[float]], table: AcceptanceTable) -> SpeculationPolicy:
    found = SpeculationPolicy(StepCost(*curve))
    found.table = table
    return found


@pytest.mark.parametrize(
    ("is_ordered", "expected"), [(False, {"second": 3}), (True, {"first": 2, "second": 1})]
)
def test_full_trees_are_cut_by_value_or_by_the_order_of_drafters(
    is_ordered: bool, expected: dict[str, int]
) -> None:
    """Whoever comes first is mostly wrong here."""
    found = SpeculationPolicy(is_adaptive=False, is_ordered=is_ordered)
    found.table = trained_table({"first": 0.1, "second": 0.9})
    first = proposal("first", [7, 8], [ROOT, 0], [0.0, 0.0])
    proposals = [first, chain("second", 5)]
    tree = merge(proposals, found.num_offered(proposals, 3), 6, found.table)
    assert found.select([tree], [3], 0)[0].count_sources() == expected


def test_the_last_drafter_of_many_has_room_however_much_the_others_propose() -> None:
    found = SpeculationPolicy(is_adaptive=False)
    names = [f"wrong-{number}" for number in range(1, 6)]
    found.table = trained_table({**dict.fromkeys(names, 0.1), "right": 0.9})
    wrong = [
        proposal(name, [100 * number + i for i in range(4)], [ROOT] * 4, [0.0] * 4)
        for number, name in enumerate(names, 1)
    ]
    proposals = [*wrong, chain("right", 4)]
    tree = merge(proposals, found.num_offered(proposals, 4), 6, found.table)
    assert found.select([tree], [4], 0)[0].count_sources() == {"right": 4}


@pytest.mark.parametrize("rate", [0.05, 0.4, 0.9])
def test_estimates_come_near_the_truth(rate: float) -> None:
    table = trained_table({"a": rate, "b": 1 - rate})
    assert table.estimate("a", 0.0, 3, 0) == pytest.approx(rate, abs=0.03)
    assert table.estimate("b", 0.0, 3, 0) == pytest.approx(1 - rate, abs=0.03)


def test_a_new_bin_starts_at_the_mean_of_its_drafter() -> None:
    table = trained_table({"a": 0.8})
    assert table.estimate("a", 0.0, 1, 3) == pytest.approx(0.8, abs=0.05)
    assert table.estimate("new", 0.0, 1, 0) == 0.5


def test_estimates_follow_a_change() -> None:
    table = trained_table({"a": 0.9})
    for _ in range(1000):
        table.record("a", 0.0, 1, 0, accepted=False)
    assert table.estimate("a", 0.0, 1, 0) < 0.2


def test_a_drafter_that_is_surer_gets_another_estimate() -> None:
    table = AcceptanceTable()
    for _ in range(100):
        table.record("a", -0.1, 1, 0, accepted=True)
        table.record("a", -5.0, 1, 0, accepted=False)
    assert table.estimate("a", -0.12, 1, 0) > 0.9
    assert table.estimate("a", -4.5, 1, 0) < 0.1


def test_free_rows_are_all_bought_and_dear_ones_are_not() -> None:
    table = trained_table({"a": 0.6})
    trees = [merge([chain("a", 6)], 9, 9, table) for _ in range(3)]
    assert [len(t) for t in policy_of(FLAT, table).select(trees, [9] * 3, 0)] == [6, 6, 6]
    assert [len(t) for t in policy_of(LINEAR, table).select(trees, [9] * 3, 0)] == [0, 0, 0]


def test_the_better_request_gets_the_nodes() -> None:
    table = trained_table({"good": 0.95, "bad": 0.1})
    trees = [merge([chain(source, 8)], 8, 8, table) for source in ("good", "bad")]
    steep = ([1, 2, 4, 8, 16], [1.0, 1.1, 1.4, 2.5, 6.0])
    good, bad = policy_of(steep, table).select(trees, [8, 8], 0)
    assert len(good) >= 3
    assert len(bad) == 0


def test_no_tree_exceeds_its_own_limit() -> None:
    table = trained_table({"a": 0.6})
    trees = policy_of(FLAT, table).select([merge([chain("a", 9)], 9, 9, table)], [4], 0)
    assert [len(tree) for tree in trees] == [4]


@st.composite
def forests(draw: st.DrawFn) -> list[list[Proposal]]:
    forest = []
    for _ in range(draw(st.integers(1, 4))):
        found = []
        for index in range(draw(st.integers(0, 3))):
            size = draw(st.integers(0, 10))
            found.append(
                proposal(
                    f"drafter{index}",
                    [draw(st.integers(0, 4)) for _ in range(size)],
                    [draw(st.integers(ROOT, node - 1)) for node in range(size)],
                    [draw(st.sampled_from([0.0, -0.1, -1.0, -5.0])) for _ in range(size)],
                )
            )
        forest.append(found)
    return forest


def rate(trees: list[TokenTree], cost: StepCost) -> float:
    tokens = len(trees) + sum(float(tree.values.sum()) for tree in trees)
    return tokens / float(cost.seconds(len(trees), len(trees) + sum(len(tree) for tree in trees)))


@given(forests(), st.floats(0, 0.5))
def test_what_is_chosen_is_a_tree_and_no_slower_than_plain_or_all(
    forest: list[list[Proposal]], slope: float
) -> None:
    table = trained_table({"drafter0": 0.7, "drafter1": 0.2}, count=20)
    cost = StepCost([1, 2], [1.0, 1.0 + slope])
    trees = [merge(found, 20, 20, table) for found in forest]
    under = SpeculationPolicy(cost)
    under.table = table
    chosen = under.select(trees, [20] * len(trees), 0)
    for tree, full in zip(chosen, trees, strict=True):
        tree.check()
        assert len(tree) <= len(full)
    none = [tree.keep(np.zeros(len(tree), dtype=np.bool_)) for tree in trees]
    assert rate(chosen, cost) >= rate(none, cost) - 1e-9
    assert rate(chosen, cost) >= rate(trees, cost) - 1e-9


@given(
    st.lists(st.floats(0.1, 20.0), min_size=1, max_size=4),
    st.integers(0, 2**31),
    st.integers(1, 3),
    st.integers(1, 8),
)
def test_no_cost_curve_changes_a_text(
    seconds: list[float], seed: int, groups: int, requests: int
) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.01 * (1 + seed % 7)
        return now[0]

    bench = Bench(seed=seed, num_groups=groups, clock=clock, max_running=8, num_blocks=200)
    rows = [1, 4, 16, 64][: len(seconds)]
    bench.policy = SpeculationPolicy(StepCost(rows, sorted(seconds)))
    bench.use_target(bench.target)
    names = ["r" * (index + 1) for index in range(requests)]

    async def scenario() -> None:
        for name in names:
            bench.add(name, [1, 2, 3], 30)
        await bench.run()

    asyncio.run(scenario())
    for name in names:
        assert bench.tokens(name) == plain_answer([1, 2, 3], 30, len(name), bench.vocab)
    bench.check_empty()


async def test_dear_rows_end_drafting() -> None:
    bench = Bench(max_running=4)
    bench.policy = SpeculationPolicy(StepCost([1, 2], [1.0, 2.0]))
    bench.use_target(bench.target)
    bench.add("a", [1, 2, 3], 200)
    await bench.run()
    last = bench.heard["a"][-1]
    assert isinstance(last, Delta)
    assert last.metrics is not None
    assert last.metrics.num_draft_tokens < 20


async def test_a_request_may_limit_its_tree_and_choose_its_drafters() -> None:
    bench = Bench(seed=5)
    bench.add("a", [1, 2, 3], 60, max_nodes=2, drafters=("second",))
    bench.add("bb", [1, 2, 3], 60, max_nodes=0)
    await bench.run()
    sizes = [
        len(tree.ancestors) - 1 for s in bench.target.steps for tree in s.trees if tree is not None
    ]
    assert max(sizes) == 2
    # Nobody takes the proposals of the other one.
    assert bench.drafters.asked == {("second", "a")}
    for name in ("a", "bb"):
        last = bench.heard[name][-1]
        assert isinstance(last, Delta)
        assert last.metrics is not None
        assert set(last.metrics.drafted_by_source) <= {"second"}
        assert bool(last.metrics.num_draft_tokens) is (name == "a")


@pytest.mark.parametrize("mode", ["off", "on"])
async def test_beyond_its_longest_context_a_request_drafts_nothing(mode: str) -> None:
    bench = Bench(seed=5, num_groups=4, pipelined_trees=mode)  # pyright: ignore[reportArgumentType]
    bench.add("a", [1, 2, 3], 80, max_context=43)
    bench.add("bb", [1, 2, 3], 80)
    await bench.run()
    ends = dict.fromkeys(("a", "bb"), 0)
    for name in ends:
        assert bench.tokens(name) == plain_answer([1, 2, 3], 80, len(name), bench.vocab)
        num_tokens = 3
        for delta in bench.heard[name]:
            assert isinstance(delta, Delta)
            # A delta of one step; a token that a drafter proposed is named by it.
            for source in delta.sources:
                num_tokens += 1
                if source != "target":
                    ends[name] = num_tokens
    assert 0 < ends["a"] <= 43 < ends["bb"]
