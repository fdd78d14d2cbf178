"""What goes wrong with one request ends that request: the others' texts stay, no block leaks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from draftline.core.arrays import Bool
from draftline.core.errors import (
    BestEffort,
    DraftlineError,
    RequestError,
    RequestFailed,
    RequestSuspected,
    StageLost,
    contain_each,
)
from draftline.core.request.output import Delta
from draftline.core.request.request import Request
from draftline.core.request.sampling_params import SamplingParams
from draftline.core.request.stop import StopRule
from draftline.core.speculation.policy import SpeculationPolicy
from draftline.core.step.in_flight import StepDeadline
from draftline.core.steps import StepInput, StepOutput
from draftline.core.tree.tree import TokenTree
from support.fakes.fake_bench import Bench, NoText
from support.fakes.fake_target import FakeTarget, plain_answer

VOCAB = 7
# Tests replace it (tests/conftest.py).
GOES_ON = BestEffort.__exit__
SECRET = "what the tenant wrote"


class Broken:
    """Raises at its n-th use."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, *_: object) -> None:
        self.left -= 1
        if self.left < 0:
            raise ValueError(SECRET)


class BrokenText(NoText):
    def __init__(self) -> None:
        self.broken = Broken(5)

    def push(self, _token_id: int) -> str:
        self.broken()
        return ""


class BrokenRules:
    """Rules whose masks fail."""

    constraint = None
    lookback = 0

    def __init__(self) -> None:
        self.broken = Broken(3)

    def allowed(self, tree: TokenTree, *_: object) -> Bool:
        return np.ones(len(tree), dtype=np.bool_)

    def masks(self, *_: object) -> None:
        self.broken()

    def advance(self, _token_ids: Sequence[int]) -> None:
        pass


def add(bench: Bench, name: str, fault: str) -> None:
    heard: list[Delta | DraftlineError] = bench.heard.setdefault(name, [])
    broken = Broken(4)

    def sink(event: Delta | DraftlineError) -> None:
        heard.append(event)
        if fault == "told":
            broken()

    params = SamplingParams(max_tokens=40)
    request = Request(name, np.array([1, 2, 3], dtype=np.int32), params, len(name), 40, sink)
    if fault == "masked":
        request = replace(request, allowed_tokens=BrokenRules())  # type: ignore[arg-type]
    stream = BrokenText() if fault == "committed" else NoText()
    bench.core.add(request, StopRule(params, (9,), 40, stream))


def assert_whole(bench: Bench, *names: str) -> None:
    for name in names:
        assert bench.tokens(name) == plain_answer([1, 2, 3], 40, len(name), VOCAB)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("fault", ["masked", "committed", "told", "planned"])
async def test_a_fault_ends_its_own_request(
    fault: str, groups: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(num_groups=groups, seed=1)
    if fault == "planned":
        opened = bench.drafters.open

        def open_request(request: object, at_once: object = None) -> None:
            if request.request_id == "bad":  # type: ignore[attr-defined]
                raise ValueError(SECRET)
            opened(request, at_once)  # type: ignore[arg-type]

        monkeypatch.setattr(bench.drafters, "open", open_request)
        monkeypatch.setattr(bench.drafters, "close", _tolerant(bench.drafters.close))
    for name in ("a", "bad", "ccccc"):
        add(bench, name, fault if name == "bad" else "none")
    await bench.run()
    assert_whole(bench, "a", "ccccc")
    error = bench.heard["bad"][-1]
    assert isinstance(error, RequestFailed)
    assert SECRET not in str(error)
    assert "ValueError at core/test_containment.py" in caplog.text
    assert SECRET not in caplog.text
    bench.check_empty()


def _tolerant(close: Callable[..., None]) -> Callable[..., None]:
    def close_if_open(request_id: str, last: Sequence[object] = ()) -> None:
        if request_id != "bad":
            close(request_id, last)

    return close_if_open


class Garbling(FakeTarget):
    """Answers one step with garbage."""

    at = 3

    def submit(self, step: StepInput) -> asyncio.Future[StepOutput]:
        answer = super().submit(step)
        if len(self.steps) == self.at:
            garbled = asyncio.get_running_loop().create_future()
            garbled.set_result(replace(answer.result(), target_tokens=None))
            return garbled
        return answer


async def test_an_answer_that_cannot_be_read_ends_its_step_and_the_engine_goes_on() -> None:
    bench = Bench(max_running=2)
    bench.use_target(Garbling(VOCAB, bench.block_size))
    for name in ("a", "bb", "ccc"):
        add(bench, name, "none")
    await bench.run()
    assert isinstance(bench.heard["a"][-1], RequestFailed)
    assert isinstance(bench.heard["bb"][-1], RequestFailed)
    assert_whole(bench, "ccc")
    bench.check_empty()


async def test_a_plan_that_fails_ends_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(max_running=2)
    for name in ("a", "bb", "ccc"):
        add(bench, name, "none")
    broken, chunks = Broken(2), bench.scheduler.prompt_chunks

    def fail_once(num_rows: int) -> object:
        if broken.left >= 0:
            broken()
        return chunks(num_rows)

    monkeypatch.setattr(type(bench.scheduler), "prompt_chunks", lambda _self, n: fail_once(n))
    await bench.run()
    assert isinstance(bench.heard["a"][-1], RequestFailed)
    assert_whole(bench, "ccc")
    bench.check_empty()


@pytest.mark.parametrize(
    "broken",
    [
        ((SpeculationPolicy, "_plan", 0), (SpeculationPolicy, "_expected", 0)),
        ((SpeculationPolicy, "_learn_lengths", 0), (SpeculationPolicy, "_learn_time", 2)),
    ],
    ids=["planned", "learned"],
)
async def test_what_only_makes_steps_faster_costs_no_request(
    broken: tuple[tuple[type, str, int], ...],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BestEffort, "__exit__", GOES_ON)
    for owner, name, at in broken:
        monkeypatch.setattr(owner, name, Broken(at))
    bench = Bench()
    for name in ("a", "bb"):
        add(bench, name, "none")
    await bench.run()
    assert_whole(bench, "a", "bb")
    bench.check_empty()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, "each once"
    assert all("event=slowed error=ValueError at core/test_con" in one for one in told)
    assert SECRET not in caplog.text


async def test_a_request_of_a_running_ones_id_is_refused() -> None:
    bench = Bench()
    bench.add("a", [1], 5)
    with pytest.raises(RequestError, match="request_id"):
        bench.add("a", [1], 5)
    await bench.run()
    assert bench.tokens("a") == plain_answer([1], 5, 1, VOCAB)


class Silent(FakeTarget):
    """Never answers from some step on."""

    silent = False

    def submit(self, step: StepInput) -> asyncio.Future[StepOutput]:
        if self.silent:
            return asyncio.get_running_loop().create_future()
        return super().submit(step)


async def test_a_step_without_an_answer_is_a_lost_stage_and_requests_go_on_elsewhere() -> None:
    bench = Bench()
    target = Silent(VOCAB, bench.block_size)
    bench.use_target(target)
    bench.core.deadline = StepDeadline(0.01)
    add(bench, "a", "none")
    for _ in range(4):
        await bench.core.step()
    target.silent = True
    with pytest.raises(StageLost, match="step_timeout_s"):
        await bench.run()
    bench.replace_target()
    await bench.run()
    assert_whole(bench, "a")


async def test_a_request_whose_steps_lose_stages_again_and_again_ends() -> None:
    bench = Bench(max_running=1)
    add(bench, "a", "none")
    add(bench, "bb", "none")
    for _ in range(2):
        bench.target.lost = True
        with pytest.raises(StageLost):
            await bench.run()
        bench.replace_target()
    await bench.run()
    assert isinstance(bench.heard["a"][-1], RequestSuspected)
    assert_whole(bench, "bb")
    bench.check_empty()


def test_the_limit_of_a_step_follows_how_long_steps_take() -> None:
    deadline = StepDeadline(1.0)
    assert deadline.limit_s == 1.0
    assert deadline.patience_s == 0.0005
    deadline.record(0.5)
    assert deadline.limit_s == 10.0
    assert deadline.patience_s == 0.02
    for _ in range(400):
        deadline.record(0.05)
    assert deadline.limit_s < 1.5
    assert deadline.times.counts == (0, 0, 0, 0, 0, 0, 400, 0, 0, 1, 0, 0, 0, 0)
    assert math.isclose(deadline.times.sum_s, 20.5)
    assert math.isclose(deadline.patience_s, 0.0025, rel_tol=0.01)
    assert StepDeadline(math.inf).limit_s == math.inf


async def test_who_leaves_while_drafters_are_asked_costs_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The only one that drafts are for leaves, while another's prompt is computed."""
    bench = Bench()
    exchange = bench.drafters.exchange

    async def leave(*asked: Any) -> Any:
        found = await exchange(*asked)
        if asked[1] and "bb" not in bench.heard:
            add(bench, "bb", "none")
            bench.core.cancel("a")
        return found

    monkeypatch.setattr(bench.drafters, "exchange", leave)
    add(bench, "a", "none")
    await bench.run()
    assert_whole(bench, "bb")
    bench.check_empty()


def test_each_part_is_contained_but_not_a_lost_stage() -> None:
    done: list[int] = []
    failed: list[tuple[int, str]] = []

    def work(part: int) -> None:
        if part == 1:
            raise ValueError(SECRET)
        if part == 4:
            raise StageLost("gone")
        done.append(part)

    with pytest.raises(StageLost):
        contain_each(work, range(6), lambda part, error: failed.append((part, str(error))))
    assert done == [0, 2, 3]
    assert failed == [(1, SECRET)]
