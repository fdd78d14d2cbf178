"""The tables of SPECTRA's rows in the documentation are those of the result files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from draftline.benchmarks.trees.suite_tables import (
    RESULTS,
    main,
    read_rows,
    tables,
)
from support.tools.pages import table_rows


def interval(value: float, low: float, high: float) -> dict[str, float]:
    return {"value": value, "low": low, "high": high}


def row(
    name: str, tau: float, difference: tuple[float, float] | None, **kinds: float
) -> dict[str, Any]:
    return {
        "name": name,
        "tau": interval(tau, tau - 0.5, tau + 0.25),
        "difference": difference and interval(sum(difference) / 2, *difference),
        "by_category": {kind: interval(value, value, value) for kind, value in kinds.items()},
    }


def content(*rows: dict[str, Any]) -> str:
    """A result file."""
    return json.dumps({"taus": rows})


def test_rows_are_told_apart_by_their_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        row("target", 1.0, None, qa=1.0),
        row("paper: ANPD", 2.0, (0.5, 1.5), qa=2.5),
        row("paper: CORE", 1.75, (-0.4, -0.1), qa=1.5),
        row("draftline: CORE", 1.875, (-0.1, 0.3), qa=1.25),
    ]
    (tmp_path / "suite-spec-bench-t0.json").write_text(content(*rows))
    main(folder=tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert "| ANPD | 2.00 (1.50-2.25) + |" in lines
    assert "| CORE | 1.75 (1.25-2.00) - |" in lines
    assert "| CORE | 1.88 (1.38-2.12) ~ |" in lines
    assert "| paper: CORE | 1.50 |" in lines
    assert not any("target" in line for line in lines)


def test_rows_of_the_page_are_those_of_the_results() -> None:
    # The page leaves out the verdicts: not all rows are on it.
    printed = re.sub(r"\) [+~-] \|", ") |", tables(read_rows(RESULTS)))
    assert table_rows("Drafters without training") <= set(printed.splitlines())
