"""The GPU benchmark's parts, on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from draftline.benchmarks.gpu import parts
from draftline.benchmarks.gpu.__main__ import NEEDED, main, plot_if_possible
from draftline.benchmarks.gpu.findings import Findings
from draftline.benchmarks.gpu.floors import DeviceRates, StepTraffic
from draftline.benchmarks.gpu.instruments.clock import Clock, Repeats, TimeBudget, covered
from draftline.benchmarks.gpu.measure.sampling import KINDS, figure_name
from draftline.benchmarks.gpu.plan import TINY_PLAN
from draftline.benchmarks.gpu.report import goals
from draftline.benchmarks.gpu.setting import GpuSetting
from typer import Typer
from typer.testing import CliRunner

CPU = torch.device("cpu")
ONCE = Repeats(warm=0, least=1, most=1, seconds=0.0)


def invoke(*arguments: str) -> Any:
    app = Typer()
    app.command()(main)
    return CliRunner().invoke(app, list(arguments))


def test_without_a_gpu_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments in ((), ("--tiny",), ("--device", "cpu")):
        result = invoke(*arguments)
        assert (result.exit_code, result.stderr) == (2, NEEDED + "\n")
    result = invoke("--device", "tpu")
    assert (result.exit_code, result.stderr) == (2, "--device must be cuda or cpu, not tpu\n")
    result = invoke("--device", "cpu", "--tiny", "--attention", "flash_attn")
    wanted = "attention: cannot be flash_attn: it needs a GPU; or use auto\n"
    assert (result.exit_code, result.stderr) == (2, wanted)


def test_spans_that_overlap_count_once() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert covered([]) == 0


def test_the_clock_counts_its_runs() -> None:
    calls: list[int] = []
    clock = Clock(CPU, Repeats(warm=2, least=3, most=4, seconds=0.0))
    assert len(clock.on_device(lambda: calls.append(1))) == 3
    assert len(calls) == 5
    clock = Clock(CPU, Repeats(warm=0, least=3, most=4, seconds=1e9))
    assert len(clock.waited(lambda: calls.append(1))) == 4


def test_the_profiler_sees_operators() -> None:
    clock = Clock(CPU, ONCE)
    matrix = torch.randn(64, 64)
    busy = clock.busy(lambda: matrix @ matrix, count=2)
    assert busy is not None
    assert busy > 0
    assert clock.busy(lambda: None) is None


def test_a_budget_is_used_up_in_shares() -> None:
    now = [10.0]
    budget = TimeBudget(100, lambda: now[0])
    now[0] = 60.0
    assert budget.is_over(0.5)
    assert not budget.is_over(0.51)
    now[0] = 110.0
    assert budget.is_over()


def test_without_time_only_the_rates_are_measured() -> None:
    findings, heard = Findings(), []
    setting = GpuSetting(TINY_PLAN, Clock(CPU, ONCE), TimeBudget(0), "auto", 16)
    run = parts.run_here(setting)
    parts.measure_all(list(parts.PARTS), setting.budget, findings, run, heard.append)
    assert heard == ["rates"]
    assert {figure.group for figure in findings.figures} == {"rates"}
    # The floor is of the better of copying and reading.
    to_floor = sorted(figure.to_floor for figure in findings.figures)
    assert to_floor[:2] == pytest.approx([1, 1])
    assert to_floor[2] >= 1
    rest = ["attention", "sampling", "products", "states", "heads", "steps", "stage", "demo"]
    assert findings.skipped == {"the time was used up": rest}


def test_without_rates_nothing_else_is_measured() -> None:
    findings = Findings()
    parts.measure_all(["sampling"], TimeBudget(60), findings, lambda *_: None, lambda _: None)
    assert findings.skipped == {"the rates of the device are not known": ["sampling"]}
    result = invoke("--device", "cpu", "--tiny", "--parts", "sampling,attn")
    assert result.exit_code == 2
    assert "not attn" in result.stderr


def test_a_part_that_fails_costs_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    findings = Findings()

    def fail() -> None:
        raise ValueError("first line\nsecond line")

    def fill() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much.")

    def fill_all() -> None:
        raise MemoryError("the KV does not fit")

    assert not findings.attempt("a", fail)
    assert not findings.attempt("b", fill)
    assert findings.attempt("c", lambda: None)
    assert not findings.attempt("d", fill_all)
    assert findings.failed == {"ValueError: first line": ["a"]}
    assert findings.skipped == {
        "out of memory (CUDA out of memory)": ["b"],
        "out of memory (the KV does not fit)": ["d"],
    }
    told = capsys.readouterr().err
    assert "in fail" in told
    assert "second line" in told


@pytest.mark.parametrize("name", ["demo", "heads"])
def test_without_the_engines_packages_a_part_alone_is_missing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, f"draftline.benchmarks.gpu.measure.{name}", None)
    findings = Findings()
    setting = GpuSetting(TINY_PLAN, Clock(CPU, ONCE), TimeBudget(0), "auto", 16)
    parts.PARTS[name](setting, findings)
    [(why, what)] = findings.skipped.items()
    assert what == [name]
    assert why.endswith("; pip install draftline")


def measured(*, is_good: bool) -> Findings:
    """One second is the floor of everything that has one."""
    slow = 1.0 if is_good else 1.5
    findings = Findings(rates=DeviceRates(1.0, 1.0))
    second = StepTraffic(1, 0)
    plan = TINY_PLAN
    findings.add(plan.whole.name, plan.one_token.name, [9.0, 1.2 * slow, 0.1], second)
    findings.add(plan.whole.name, plan.tree.name, [1.5 * slow * slow], second)
    findings.add("attention of a layer", plan.attention_goal.name, [1.4 * slow], second)
    for kind, micros in zip(KINDS, (50, 120, 190, 180, 170), strict=True):
        name = figure_name(plan.sampling_rows, plan.sampling_vocab, kind)
        findings.add("sampling", name, [1e-6 * micros * slow], second)
    findings.note(f"host, {plan.whole.name}", {"between_share": 0.04 * slow})
    return findings


def test_goals_that_are_reached() -> None:
    found = goals(TINY_PLAN, measured(is_good=True))
    assert [goal.verification_result for goal in found] == ["reached"] * 5
    values = [goal.found for goal in found]
    assert values == ["1.20 x floor", "1.25 x one token", "71%", "190 us", "4.0%"]


def test_goals_that_are_not() -> None:
    found = goals(TINY_PLAN, measured(is_good=False))
    assert [goal.verification_result for goal in found] == ["NOT reached"] * 5
    unknown = goals(TINY_PLAN, Findings())
    assert [goal.verification_result for goal in unknown] == ["not measured"] * 5


def test_without_matplotlib_there_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plot_if_possible(measured(is_good=True), "a GPU", tmp_path / "a.png")
    assert "pip install 'draftline[bench]'" in capsys.readouterr().out
    assert not (tmp_path / "a.png").exists()
