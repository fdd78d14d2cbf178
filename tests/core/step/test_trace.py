"""What the events of a trace say agrees with what requests got; and nothing costs anything off."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from itertools import count

import pytest
from draftline.core.request.output import TARGET_SOURCE, Delta
from draftline.core.step.trace import StepTrace, TraceEvent
from draftline.core.steps import StepInput, StepOutput
from support.fakes.fake_bench import Bench
from support.fakes.fake_target import FakeTarget


class Events:
    """A sink, and a clock that counts how often it was read."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.events: list[TraceEvent] = []
        ticks = count(1)
        self.trace = StepTrace(lambda: float(next(ticks)), self)

    def row(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def write(self, events: Sequence[TraceEvent]) -> None:
        self.events += events

    def named(self, name: str) -> list[TraceEvent]:
        """Of the host's row."""
        host = self.names.index("host")
        return [one for one in self.events if one.row == host and one.name == name]

    def of(self, row: str) -> list[TraceEvent]:
        return [one for one in self.events if self.names[one.row] == row]


async def run_traced(**options: int) -> tuple[Bench, Events]:
    """Three requests over the fakes."""
    events = Events()
    bench = Bench(trace=events.trace, **options)
    for name in ("a", "bb", "ccc"):
        bench.add(name, [1, 2, 3] * 12, 20)
    await bench.run()
    return bench, events


async def test_events_add_up_to_what_requests_got() -> None:
    bench, events = await run_traced(seed=5, num_groups=2)
    deltas = [
        event for heard in bench.heard.values() for event in heard if isinstance(event, Delta)
    ]
    metrics = [delta.metrics for delta in deltas if delta.metrics is not None]
    sources = Counter(source for delta in deltas for source in delta.sources)
    accepted, verified = Counter[str](), Counter[str]()
    commits = [one.args for one in events.named("commit")]
    for args in commits:
        accepted.update(args["accepted"])
    for built in events.named("build"):
        verified.update(built.args["nodes"])
    assert sum(args["first_tokens"] for args in commits) == 3
    assert sum(args["tokens"] for args in commits) == 3 * 19
    assert accepted == sources - Counter({TARGET_SOURCE: sources[TARGET_SOURCE]})
    assert accepted.total() > 0
    assert verified == sum((Counter(found.drafted_by_source) for found in metrics), Counter())
    assert sum(args["requests"] for args in commits) == sum(found.num_steps for found in metrics)


async def test_events_describe_the_steps_that_were_submitted() -> None:
    # Every drafter is asked.
    bench, events = await run_traced(rows=20, is_adaptive=False)
    steps = bench.target.steps
    assert all(step.is_traced for step in steps)
    builds, commits = events.named("build"), events.named("commit")
    ids = [step.step_id for step in steps]
    assert [one.args["step"] for one in builds] == [one.args["step"] for one in commits] == ids
    for built, committed, step in zip(builds, commits, steps, strict=True):
        args = built.args
        assert args["rows"] == len(step.token_ids)
        assert args["requests"] == sum(tree is not None for tree in step.trees)
        assert args["rows"] == args["prompt_rows"] + args["requests"] + sum(args["nodes"].values())
        assert built.begin < built.end < committed.begin < committed.end
    asks = {one.args["step"]: one for one in events.named("ask")}
    for built in builds:
        if built.args["requests"]:
            ask = asks[built.args["step"]]
            assert ask.begin < ask.end == built.begin
            assert {*ask.args["drafters"]} <= {"first", "second"}
    drafted = [asks[one.args["step"]].args["drafters"] for one in builds if one.args["nodes"]]
    assert drafted[-1].keys() == {"first", "second"}
    assert any(one.args["prompt_rows"] and one.args["requests"] for one in builds)


class SpannedTarget(FakeTarget):
    """Two stages, the first of which has worked in each step from 0 to 4, the second to 10."""

    def _run(self, step: StepInput) -> StepOutput:
        spans = (0.0, 4.0), (4.0, 10.0)
        return dataclasses.replace(super()._run(step), stage_spans=spans)


async def test_stages_have_rows_and_heads_stand_at_the_end_of_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("support.fakes.fake_bench.FakeTarget", SpannedTarget)
    events = Events()
    bench = Bench(heads=True, is_adaptive=False, trace=events.trace)
    bench.add("a", [1, 2, 3] * 4, 6)
    await bench.run()
    assert events.names == ["host", "stage 0", "stage 1"]
    first, last = events.of("stage 0"), events.of("stage 1")
    assert [(one.begin, one.end) for one in first] == [(0.0, 4.0)] * len(bench.target.steps)
    assert [one.name for one in first][:2] == ["prompt", "tree"]
    heads = [one for one in last if one.name not in {"prompt", "tree"}]
    assert heads
    assert all(4.0 <= one.begin <= one.end == 10.0 for one in heads)


def test_a_drafters_events_do_not_overlap() -> None:
    events = Events()
    answered = events.trace.drafter("far")
    answered(0.5, 2)
    answered(1.5, 0)
    drafted, observed = events.of("far")
    assert (drafted.name, drafted.begin, drafted.end) == ("draft", 0.5, 1.0)
    # By its own clock it took half a second more than there is.
    assert (observed.name, observed.begin, observed.end) == ("observe", 1.0, 2.0)
    assert [one.args for one in (drafted, observed)] == [{"requests": 2}, {"requests": 0}]


async def test_steps_are_not_traced_unless_asked() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3], 5)
    await bench.run()
    assert bench.target.steps
    assert not any(step.is_traced for step in bench.target.steps)
