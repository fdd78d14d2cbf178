"""The tables of heads in the documentation are those of the result files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from draftline.benchmarks.heads import plots
from draftline.benchmarks.heads.tables import RESULTS, main, tables
from draftline.measure.simulate.cost_profile import bundled_profiles
from support.tools.pages import table_rows


def content(**taus: float) -> str:
    return content_of(taus)


def content_of(taus: Mapping[str, float]) -> str:
    rows = [
        {
            "name": name,
            "tau": {"value": tau, "low": tau - 1, "high": tau + 1},
            "by_prompt": [[round(100 * tau), 100]] * 3,
        }
        for name, tau in {"target": 1.0, **taus}.items()
    ]
    counts = {"lengths": [1, 2, 1], "drafted": {"a": 9, "b": 3}}
    settings: dict[str, Any] = {
        row["name"]: {"speedup": row["tau"]["value"] / 2, "all_rounds": {"counts": counts}}
        for row in rows
    }
    draft_ms = {name: {"a": 1.25, "b": 0.5} for name in taus}
    return json.dumps({"taus": rows, "settings": settings, "draft_ms": draft_ms})


def test_rows_depths_and_speeds(tmp_path: Path) -> None:
    (tmp_path / "heads-bundled-t0.json").write_text(content(chain=2.0, tree=3.0))
    (tmp_path / "heads-humaneval-t1.json").write_text(content(tree=1.5, other=1.25))
    (tmp_path / "heads-bundled-t0-8b-h100.json").write_text(content(tree=3.0))
    lines = tables(tmp_path).splitlines()
    assert lines[0] == "| tau | bundled, greedy | HumanEval, T = 1 |"
    assert lines[2:5] == [
        "| chain | 2.00 (1.00-3.00) | - |",
        "| tree | 3.00 (2.00-4.00) | 1.50 (0.50-2.50) |",
        "| other | - | 1.25 (0.25-2.25) |",
    ]
    assert lines[8] == "| chain | 0.75 | 0.25 | 0.00 | 0.00 | 0.00 | 0.00 | 1.8 |"
    assert lines[11] == "| simulated speed: 8B on one H100 | bundled, greedy |"
    assert lines[13:] == ["| tree | 1.50x |"]


def test_kappa_and_theta_under_load(tmp_path: Path) -> None:
    (tmp_path / "heads-bundled-t0.json").write_text(content(chain=2.0))
    (tmp_path / "heads-load-8-8b-h100.json").write_text(content(griffin=2.2))
    lines = tables(tmp_path).splitlines()
    head = "chains under load, kappa, speed-up, theta: 8B on one H100"
    assert lines[-3:] == [
        f"| {head} | 8 at once |",
        "| --- | --- |",
        "| griffin | 2.20, 1.10x, 2.00 |",
    ]


def test_rounds_have_a_mean_and_a_range(tmp_path: Path) -> None:
    (tmp_path / "heads-bundled-t0.json").write_text(content(chain=2.0))
    found = json.loads(content_of({"training-free": 2.0, "everything merged": 3.0}))
    for name, speedups in (("training-free", [1.5, 2.0]), ("everything merged", [2.0, 2.5])):
        found["settings"][name]["speedups"] = speedups
    (tmp_path / "heads-rounds-bundled-t1-70b-2-h200.json").write_text(json.dumps(found))
    assert tables(tmp_path).splitlines()[-4:] == [
        "| simulated speed over several rounds | bundled, T = 1 |",
        "| --- | --- |",
        "| 70B over 2 H200; training-free | 1.75x (1.50-2.00) |",
        "| 70B over 2 H200; everything merged | 2.25x (2.00-2.50) |",
    ]


def test_tokens_that_a_draft_must_bring_to_be_worth_its_time(tmp_path: Path) -> None:
    taus = {"tree": 3.0, "training-free": 2.0, "everything merged": 3.25}
    found = json.loads(content_of(taus))
    found["draft_ms"]["tree"] = {"tree": 5.0}
    found["settings"]["training-free"]["output_throughput"] = 300.0
    for name in ("heads-bundled-t0", "heads-bundled-t0-8b-h100"):
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    assert tables(tmp_path).splitlines()[-3:] == [
        "| tokens that a draft must bring | tree | all of them bring |",
        "| --- | --- | --- |",
        "| 8B on one H100; bundled, greedy | 1.50 | 1.25 |",
    ]


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "heads-bundled-t0.json").write_text(content(chain=2.0, tree=3.0))
    plots.main(tmp_path)
    assert [path.name for path in tmp_path.glob("*.png")] == ["heads.png"]


def test_rows_of_the_page_are_those_of_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    main(folder=RESULTS)
    assert table_rows("Trained heads") <= set(capsys.readouterr().out.splitlines())


def test_every_profile_s_results_are_read() -> None:
    files = RESULTS.glob("heads-*-t?-*.json")
    profiles = {re.split(r"-t[01]-", path.stem)[1] for path in files}
    assert profiles <= set(bundled_profiles())
