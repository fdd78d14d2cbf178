"""Tables of the results of `draftline bench --suite spectra`.

    python -m draftline.benchmarks.trees.suite_tables

Reads `suite-PROMPTS-TEMPERATURE*.json` of `benchmarks/results/`, as many as are there, and prints
their tables. docs/results.md shows some rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ...deploy.cli.bench.suites import DRAFTLINE, PAPER
from ...measure.clients.setting import TARGET_ONLY
from ...measure.report.intervals import Interval
from ...measure.report.marked_part import markdown_table
from ..heads.tables import PROMPTS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TEMPERATURES = {"t0": "greedy", "t1": "T = 1"}
TITLES = {
    PAPER: "drafters as the paper has them",
    DRAFTLINE: "draftline's defaults",
}
# Beside a value: its difference to the row above is told from none, or is not.
SIGNS = {"higher": "+", "lower": "-", "undecided": "~"}

# Of a file: its rows of tau by name, in order.
Rows = Mapping[str, Mapping[str, Any]]


def read_rows(folder: Path) -> dict[str, Rows]:
    """The rows of the files that are there, by what a column is headed."""
    found = {}
    for prompts, name in PROMPTS.items():
        for temperature, label in TEMPERATURES.items():
            rows: dict[str, Mapping[str, Any]] = {}
            for path in sorted(folder.glob(f"suite-{prompts}-{temperature}*.json")):
                taus = json.loads(path.read_text("utf-8"))["taus"]
                rows |= {row["name"]: row for row in taus}
            if rows:
                found[f"{name}, {label}"] = rows
    return found


def tables(columns: Mapping[str, Rows]) -> str:
    """A table for each profile, and one of categories where prompts have them."""
    parts = [table for profile in TITLES for table in _profile_table(profile, columns)]
    parts += [table for head, rows in columns.items() for table in _category_table(head, rows)]
    return "\n\n".join(parts)


def _profile_table(profile: str, columns: Mapping[str, Rows]) -> Iterator[str]:
    own = {head: rows for head, rows in columns.items() if _names(profile, rows)}
    if not own:
        return
    names = list(dict.fromkeys(name for rows in own.values() for name in _names(profile, rows)))
    lines = [
        [name.partition(": ")[2], *(_tau(rows, name) for rows in own.values())] for name in names
    ]
    yield markdown_table([TITLES[profile], *own], lines)


def _category_table(head: str, rows: Rows) -> Iterator[str]:
    categories = list(next(iter(rows.values()))["by_category"])
    if categories:
        lines = [
            [name, *(f"{row['by_category'][kind]['value']:.2f}" for kind in categories)]
            for name, row in rows.items()
            if name != TARGET_ONLY
        ]
        yield markdown_table([head, *categories], lines)


def _names(profile: str, rows: Rows) -> list[str]:
    return [name for name in rows if name.startswith(f"{profile}: ")]


def _tau(rows: Rows, name: str) -> str:
    row = rows.get(name)
    if row is None:
        return "-"
    tau = Interval(**row["tau"])
    difference = row["difference"]
    sign = SIGNS[Interval(**difference).verdict] if difference else ""
    return f"{tau.value:.2f} ({tau.low:.2f}-{tau.high:.2f}) {sign}".rstrip()


def main(
    *,
    folder: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Print the tables in Markdown."""
    print(tables(read_rows(folder)))


if __name__ == "__main__":
    typer.run(main)
