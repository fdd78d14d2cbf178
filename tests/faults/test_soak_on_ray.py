"""The soak of `make soak`, short: its faults on real Ray, and what it finds wrong without one."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from draftline.benchmarks.serving.ray_servers import Process
from draftline.benchmarks.serving.soak.clients import Choice, End, SoakAnswer, is_clear
from draftline.benchmarks.serving.soak.faults import Done, Fault
from draftline.benchmarks.serving.soak.judge import judge, outcomes_of
from draftline.benchmarks.serving.soak.run import SoakSetting, soak
from draftline.benchmarks.serving.soak.setup import SoakPrompt
from draftline.benchmarks.serving.soak.watch import process_leaks
from draftline.deploy.api.errors import bad_request

ASK = SoakPrompt("amber", "greedy", "/v1/completions", {"stream": True}, 0.0, None)
TOKENS = (3, 1, 4, 1, 5)


def answer(
    end: End = "whole", tokens: tuple[int, ...] = TOKENS, finish: str | None = "length"
) -> SoakAnswer:
    text = "".join(map(str, tokens))
    choice = Choice(text, list(tokens), finish_reason=finish)
    return SoakAnswer(0.0, end, "cmpl-1", {0: choice}, "503: gone", 10.0)


def problems(given: SoakAnswer, *faults: Done, resumed: bool = False) -> list[str]:
    ids = {"cmpl-1"} if resumed else set()
    return list(judge(outcomes_of([ASK], [given], [answer()], faults, ids)).problems)


@pytest.mark.parametrize(
    "given",
    [answer(), answer("left", TOKENS[:2], None)],
)
def test_right_ends_pass(given: SoakAnswer) -> None:
    assert not problems(given)
    assert not problems(given, resumed=True)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (answer(tokens=(3, 1, 4, 2, 5)), "token 3: 2 instead of 1"),
        (answer(tokens=TOKENS[:4]), "4 tokens"),
        (answer(finish="stop"), "stop"),
        (answer("left", (3, 2), None), "token 1"),
        (answer("error", (*TOKENS, 9), None), "no beginning"),
        (answer("hung", TOKENS[:2], None), "hung"),
        (answer("cut", TOKENS[:2], None), "cut"),
        (answer("unclear", (), None), "unclear"),
        (answer("error", TOKENS[:2], None), "0 of 1 interrupted streams"),
    ],
)
def test_wrong_ends_are_found(given: SoakAnswer, found: str) -> None:
    assert any(found in problem for problem in problems(given))


def test_only_a_lost_ingress_excuses_a_cut() -> None:
    given = answer("cut", TOKENS[:2], None)
    done = Done(Fault("node", "kill", 0.0, 0.0), 1, 8.0, 9.0, frozenset({"stage", "ingress"}))
    assert not problems(given, done)
    assert problems(given, replace(done, began_at=-20.0))
    assert problems(given, replace(done, lost=frozenset({"stage", "coordinator"})))
    assert problems(answer("cut", (2,), None), done)


def test_processes_that_are_too_many_or_too_full_are_found() -> None:
    one = Process(pid=7, started=1, role="raylet", threads=20, fds=100)
    grown = replace(one, threads=25, fds=109)
    assert not process_leaks([one], [replace(one, pid=8, threads=24, fds=108)])
    assert len(process_leaks([one], [grown])) == 2
    assert process_leaks([one], [one, replace(one, pid=8)]) == [
        "2 processes raylet, 1 at the start"
    ]


def test_errors_of_the_api_are_clear() -> None:
    assert is_clear(bad_request("n", "too many").body)
    assert not any(map(is_clear, (None, "Internal Server Error", {"error": "gone"}, {})))


@pytest.mark.cluster
@pytest.mark.redis
@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_short_soak_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    found = soak(SoakSetting(minutes=1.75, requests=90, fault_s=15.0, stages=1))
    assert not found.problems
    assert found.verdict.interrupted > 0
    assert {done.fault.victim for done in found.served.faults if done.pid} >= {"coordinator"}
