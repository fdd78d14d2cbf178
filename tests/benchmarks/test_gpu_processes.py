"""Parts of the GPU benchmark in processes of their own: what one finds, and how one may end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from draftline.benchmarks.gpu.findings import Findings, load_findings, save_findings
from draftline.benchmarks.gpu.floors import DeviceRates, StepTraffic
from draftline.benchmarks.gpu.parts import PartProcesses, SettingFacts
from draftline.benchmarks.gpu.setting import GpuSetting

FACTS = SettingFacts("cpu", True, "auto", 16, 400.0, 0.0)


def filled() -> Findings:
    findings = Findings(rates=DeviceRates(10.0, 20.0))
    findings.add(
        "a group", "one", [2.0, 3.0], StepTraffic(5, 7), wall=[4.0], note="n", order=(1, 2)
    )
    findings.note("a fact", {"x": 1.5, "y": None})
    findings.skip("this", "no room")
    findings.fail("that", "ValueError")
    return findings


def measure_one(setting: GpuSetting, findings: Findings) -> None:
    findings.add("a group", setting.device.type, [1.0], StepTraffic(1, 1))


def measure_and_end(setting: GpuSetting, findings: Findings) -> None:
    measure_one(setting, findings)
    os._exit(7)


def measure_and_hang(setting: GpuSetting, findings: Findings) -> None:
    measure_one(setting, findings)
    time.sleep(600)


def test_findings_are_the_same_behind_a_file(tmp_path: Path) -> None:
    findings, again = filled(), Findings()
    save_findings(tmp_path / "one.json", findings)
    load_findings(tmp_path / "one.json", again)
    again.on_change = findings.on_change
    assert again == findings


# From Python 3.12 on.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_part_that_ends_or_hangs_costs_no_figure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    findings, heard = filled(), []
    processes = PartProcesses(FACTS, tmp_path / "state.json", 60.0, "fork")
    for name, part in (("good", measure_one), ("ends", measure_and_end)):
        processes.run(name, part, findings, lambda: heard.append(len(findings.figures)))
    hasty = PartProcesses(FACTS, tmp_path / "state.json", 1.0, "fork")
    hasty.run("hangs", measure_and_hang, findings, lambda: heard.append(len(findings.figures)))
    assert len(findings.figures) == 4
    assert heard[-1] == 4
    reasons = {name: why for why, names in findings.failed.items() for name in names}
    assert reasons == {
        "that": "ValueError",
        "ends": "its process ended with status 7",
        "hangs": "its process ended beyond its time, or by a fault",
    }
    # Where it hung.
    assert "in measure_and_hang" in capfd.readouterr().err
