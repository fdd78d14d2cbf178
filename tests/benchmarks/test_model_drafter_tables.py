"""The tables of model drafters in the documentation are those of the result files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from draftline.benchmarks.model_drafters import plots
from draftline.benchmarks.model_drafters.acceptance import coupled, rejected
from draftline.benchmarks.model_drafters.tables import RESULTS, main, tables
from support.tools.pages import table_rows

NAMES = ("same chain", "SLRS")


def content() -> str:
    rows = [{"name": name, "tau": {"value": 2.0, "low": 1.5, "high": 2.5}} for name in NAMES]
    counts = {"lengths": [1, 2, 1], "drafted": {"a": 9}}
    settings = {name: {"speedup": 1.25, "all_rounds": {"counts": counts}} for name in NAMES}
    load = {"small_model": "model-0.5b"}
    found = {"taus": rows, "settings": settings, "draft_ms": {}, "load": load}
    return json.dumps(found)


def test_tables_of_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "models-bundled-t0.json").write_text(content())
    (tmp_path / "models-bundled-t0.7.json").write_text(content())
    (tmp_path / "models-bundled-t0-8b-h100.json").write_text(content())
    (tmp_path / "models-bundled-t1-8b-h100.json").write_text(content())
    expected = {"rows": [{"name": "same chain", "expected": {"0": 0.5, "1": 0.25}}]}
    (tmp_path / "models-acceptance.json").write_text(json.dumps(expected))
    lines = tables(tmp_path).splitlines()
    assert lines[0] == "| tau | bundled, greedy | bundled, T = 0.7 |"
    assert "| same chain | greedy | 0.50 | 0.75 |" in lines
    assert "| same chain | T = 1 | 0.25 | - |" in lines
    assert "| simulated speed: 8B on one H100 | bundled, greedy | bundled, T = 1 |" in lines
    assert "| SLRS | 1.25x | 1.25x |" in lines
    best = "same chain (1.25) | none | model-0.5b"
    assert lines[-2:] == [f"| bundled, greedy | {best} |", f"| bundled, T = 1 | {best} |"]


def test_rows_of_the_page_are_those_of_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    main(folder=RESULTS)
    rows = table_rows("Small models as drafters")
    assert rows <= set(capsys.readouterr().out.splitlines())


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "models-bundled-t0.json").write_text(content())
    plots.main(tmp_path)
    assert [path.name for path in tmp_path.glob("*.png")] == ["models.png"]
    (tmp_path / "models-bundled-t1-8b-h100.json").write_text(content())
    plots.main(tmp_path)
    drawn = {path.name: path.read_bytes() for path in tmp_path.glob("*.png")}
    assert drawn.keys() == {"models.png", "models-speed.png"}
    assert all(png.startswith(b"\x89PNG") for png in drawn.values())


def test_expected_acceptance_by_hand() -> None:
    p = np.log(np.array([[0.5, 0.3, 0.2]]))
    q = np.log(np.array([[0.2, 0.2, 0.6]]))
    np.testing.assert_allclose(rejected(p, q, 1.0), [0.6])
    # A fourth token is the drafter's alone.
    wider = np.log(np.array([[0.1, 0.1, 0.3, 0.5]]))
    np.testing.assert_allclose(rejected(p, wider, 1.0), [0.4])
    rng = np.random.default_rng(0)
    assert coupled(p, q, 0.0, rng).tolist() == [0.0]
    many = np.repeat(p, 4000, axis=0)
    found = coupled(many, np.repeat(q, 4000, axis=0), 1.0, rng).mean()
    # Of a token x: 1 over the sum over y of max(p_y / p_x, q_y / q_x).
    ratios = [
        1 / sum(max(a / x, b / y) for a, b in zip((0.5, 0.3, 0.2), (0.2, 0.2, 0.6), strict=True))
        for x, y in zip((0.5, 0.3, 0.2), (0.2, 0.2, 0.6), strict=True)
    ]
    assert abs(found - sum(ratios)) < 0.02
