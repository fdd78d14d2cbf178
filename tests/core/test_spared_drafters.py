"""Behind streamed trees drafters of other processes wait until those of this one are unsure."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pytest
from draftline.core.proposals import Proposal, Query, StepCommit
from draftline.core.request.sampling_params import StreamingMode
from draftline.core.schedule import streaming
from draftline.core.speculation.draft_plan import AskPlan, DraftBatch
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


async def calls_of(mode: StreamingMode) -> list[tuple[tuple[str, ...], bool]]:
    bench = Bench(seed=3, num_groups=9, num_blocks=400, streaming=mode, is_adaptive=False)
    exchanges = Exchanges(bench)
    bench.add("r", [1, 2, 3], 60)
    await bench.run()
    assert bench.tokens("r") == plain_answer([1, 2, 3], 60, 1, 7)
    return exchanges.calls


async def test_who_is_sure_spares_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SURE_VALUE", 0.0)
    assert {asked for asked, _ in await calls_of("on")} == {QUICK}


async def test_who_is_not_is_joined_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SURE_VALUE", 2.0)
    calls = await calls_of("on")
    assert len(calls) > 20
    assert [asked for asked, _ in calls] == [QUICK, SLOW] * (len(calls) // 2)
    assert not any(has_commits for asked, has_commits in calls if asked == SLOW), "told once"


async def test_rounds_ask_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SURE_VALUE", 0.0)
    assert {asked for asked, _ in await calls_of("off")} == {ALL}


def test_what_is_not_asked_is_not_judged() -> None:
    choices = np.array([[1, 2, 5]])
    plan = AskPlan({"a": ("r",), "b": ("r",), "c": ("r",)}, {}, ("r",), choices)
    batch = DraftBatch({}, 0.0, 0.0, plan, {}, frozenset({"b", "new"}))
    assert batch.plan_heard(("a", "b", "c", "new")).choices.tolist() == [[1, 0, 5]]
    assert choices.tolist() == [[1, 2, 5]]
    assert DraftBatch({}, 0.0, 0.0, plan, {}).plan_heard(("a", "b", "c")) is plan
