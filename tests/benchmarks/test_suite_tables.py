"""The tables of suites in the documentation are those of the result files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from draftline.benchmarks.suite_tables import FILES, RESULTS, Suite, tables
from draftline.measure.simulate.cost_profile import bundled_profiles
from support.tools.pages import table_rows

SECTIONS = {
    Suite.SPECTRA: "Drafters without training",
    Suite.HEADS: "Trained heads",
    Suite.MODEL_DRAFTERS: "Small models as drafters",
}


def content(taus: dict[str, float]) -> str:
    rows: list[dict[str, Any]] = [
        {"name": name, "tau": {"value": tau, "low": tau - 1, "high": tau + 1}}
        for name, tau in {"target": 1.0, **taus}.items()
    ]
    return json.dumps({"taus": rows, "settings": {}})


def test_taus_have_a_column_for_each_file(tmp_path: Path) -> None:
    (tmp_path / "heads-bundled-t0.json").write_text(content({"chain": 2.0, "tree": 3.0}))
    (tmp_path / "heads-humaneval-t1.json").write_text(content({"tree": 1.5, "other": 1.25}))
    assert tables(tmp_path, Suite.HEADS).splitlines() == [
        "| tau | bundled, greedy | HumanEval, T = 1 |",
        "| --- | --- | --- |",
        "| chain | 2.00 (1.00-3.00) | - |",
        "| tree | 3.00 (2.00-4.00) | 1.50 (0.50-2.50) |",
        "| other | - | 1.25 (0.25-2.25) |",
    ]


def test_rows_as_published_and_as_by_default_are_tables_of_their_own(tmp_path: Path) -> None:
    rows = {"paper: CORE": 1.75, "draftline: CORE": 1.875}
    (tmp_path / "suite-spec-bench-t0.json").write_text(content(rows))
    lines = tables(tmp_path, Suite.SPECTRA).splitlines()
    assert lines[0] == "| drafters as the paper has them | Spec-Bench, greedy |"
    assert lines[2] == "| CORE | 1.75 (0.75-2.75) |"
    assert lines[4] == "| draftline's defaults | Spec-Bench, greedy |"
    assert lines[6:] == ["| CORE | 1.88 (0.88-2.88) |"]


def test_numbers_of_streams_are_rows(tmp_path: Path) -> None:
    for streams, speedup in ((16, 1.25), (2, 1.5)):
        row = {"tau": 2.0, "kappa": 1.0, "theta": 1.0 / speedup, "speedup": speedup}
        text = json.dumps({"taus": [], "settings": {"target": {}, "chain": row}})
        (tmp_path / f"heads-streams-{streams}-bundled-t0-8b-h100.json").write_text(text)
    assert tables(tmp_path, Suite.HEADS).splitlines() == [
        "| 8B on one H100; streams | tau | kappa | theta | speed-up |",
        "| --- | --- | --- | --- | --- |",
        "| chain, bundled, greedy; 2 | 2.00 | 1.00 | 0.67 | 1.50x |",
        "| chain, bundled, greedy; 16 | 2.00 | 1.00 | 0.80 | 1.25x |",
    ]


@pytest.mark.parametrize("suite", Suite)
def test_rows_of_the_page_are_those_of_the_results(suite: Suite) -> None:
    rows = table_rows(SECTIONS[suite])
    assert rows
    assert rows <= set(tables(RESULTS, suite).splitlines())


def test_the_results_of_every_profile_are_read() -> None:
    for name in FILES.values():
        files = RESULTS.glob(f"{name}-*-t?*-*.json")
        profiles = {re.split(r"-t[0-9.]+-", path.stem)[1] for path in files}
        assert profiles <= set(bundled_profiles())
