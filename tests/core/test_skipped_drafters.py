"""Behind streamed trees drafters of other processes wait until those of this one are unsure."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pytest
from draftline.core.pipelined import drafting as pipelined_drafting
from draftline.core.proposals import DraftCost, Proposal, Query, StepCommit, chain_proposal
from draftline.core.request.sampling_params import PipeliningMode
from draftline.core.speculation.draft_plan import DraftBatch, DraftPlan, PlannedRequest, StepOutcome
from draftline.core.speculation.policy import SpeculationPolicy
from draftline.core.speculation.step_cost import StepCost
from draftline.core.tree.merge import merge
from draftline.core.tree.tree import TreeBatch
from draftline.core.verify.walk import Paths
from support.fakes.fake_bench import Bench
from support.fakes.fake_target import plain_answer

ALL, QUICK, SLOW = ("first", "second"), ("first",), ("second",)


class Exchanges:
    """Of a bench whose second drafter is of another process: who was asked each time, and whether
    commits were told."""

    def __init__(self, bench: Bench) -> None:
        self.calls: list[tuple[tuple[str, ...], bool]] = []
        self._exchange = bench.drafters.exchange
        bench.drafters.remote = frozenset(SLOW)
        bench.drafters.exchange = self.exchange  # type: ignore[method-assign]

    async def exchange(
        self,
        commits: Sequence[StepCommit],
        queries: Sequence[Query],
        asked: Mapping[str, Collection[str]] | None = None,
    ) -> dict[str, list[Proposal]]:
        if queries:
            assert asked is not None
            self.calls.append((tuple(asked), bool(commits)))
        return await self._exchange(commits, queries, asked)


async def calls_of(mode: PipeliningMode) -> list[tuple[tuple[str, ...], bool]]:
    bench = Bench(seed=3, num_groups=9, num_blocks=400, pipelined_trees=mode, is_adaptive=False)
    exchanges = Exchanges(bench)
    bench.add("r", [1, 2, 3], 60)
    await bench.run()
    assert bench.tokens("r") == plain_answer([1, 2, 3], 60, 1, 7)
    return exchanges.calls


async def test_sure_drafters_let_slow_ones_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelined_drafting, "SURE_VALUE", 0.0)
    assert {asked for asked, _ in await calls_of("on")} == {QUICK}


async def test_unsure_drafters_are_joined_by_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelined_drafting, "SURE_VALUE", 2.0)
    calls = await calls_of("on")
    assert len(calls) > 20
    assert [asked for asked, _ in calls] == [QUICK, SLOW] * (len(calls) // 2)
    assert not any(has_commits for asked, has_commits in calls if asked == SLOW), "told once"


async def test_steps_of_whole_trees_ask_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelined_drafting, "SURE_VALUE", 0.0)
    assert {asked for asked, _ in await calls_of("off")} == {ALL}


@pytest.mark.parametrize("skipped", [(), ("b",)])
def test_nothing_is_learned_of_drafters_that_were_skipped(skipped: tuple[str, ...]) -> None:
    policy, costs = SpeculationPolicy(StepCost([1, 64], [1.0, 1.2])), {"b": DraftCost(0.0, 0.2)}
    wish = PlannedRequest("r", 0.0, None, 100, 100)
    tree = merge([chain_proposal("b", np.arange(1, dtype=np.int32))], 4, 4, policy.table)
    for step in range(80):
        plan = DraftPlan({"b": ("r",)}, buckets={"r": 0})
        batch = DraftBatch({}, 0.0, 0.0, plan, costs, frozenset(skipped))
        outcome = StepOutcome(2, 1.0, 0, batch)
        path = [(0, 0, 0), (1, 9, -1)]
        outcome.count(["r"], [tree], TreeBatch.of([tree]), Paths.of([path]))
        policy.update(outcome, 1.0 + step)
    # What always brought a token pays; what nobody knows is only tried.
    plan = policy.plan([wish], costs, 0)
    assert ("r" in plan.by_drafter.get("b", ()) and not plan.explored_s) is not skipped
