"""Tables of the results of `draftline bench --suite spectra`.

    python -m draftline.benchmarks.trees.suite_tables

Reads `suite-PROMPTS-TEMPERATURE*.json` of `benchmarks/results/`, as many as are there, and prints
their tables. docs/results.md shows some rows.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ...deploy.cli.bench.suite_rows import BETWEEN, DRAFTLINE, FIRST_ROWS, PAPER
from ...measure.clients.setting import TARGET_ONLY
from ...measure.report.intervals import Interval
from ...measure.report.marked_part import markdown_table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PROMPTS = {
    "bundled": "bundled",
    "bundled-16": "bundled, 16 nodes",
    "humaneval": "HumanEval",
    "spec-bench": "Spec-Bench",
}
TEMPERATURES = {"t0": "greedy", "t1": "T = 1"}
TITLES = {
    PAPER: "drafters as the paper has them",
    DRAFTLINE: "draftline's defaults",
    BETWEEN: "from the papers' drafters to draftline's",
}
# Of profiles whose files tell it: speed over that of the target alone, by processor time.
TIMED = (BETWEEN,)
# Rows that follow no other one, so that they are compared with none.
FIRST = frozenset(f"{BETWEEN}: {row}" for row in FIRST_ROWS)
# The halves of CORE, by the drafters of the rows that have both.
HALVES = {"forward": f"{PAPER}-core-no-backward", "backward": f"{PAPER}-core-no-forward"}
# Beside a value: its difference to the row above is told from none, or is not.
SIGNS = {"higher": "+", "lower": "-", "undecided": "~"}

# Of a file: its rows of tau by name, in order; each with its `speed` and what was `accepted` of
# each drafter, as a share of all tokens.
Rows = Mapping[str, Mapping[str, Any]]


def read_rows(folder: Path) -> dict[str, Rows]:
    """The rows of the files that are there, by what a column is headed."""
    found = {}
    for prompts, name in PROMPTS.items():
        for temperature, label in TEMPERATURES.items():
            rows: dict[str, Mapping[str, Any]] = {}
            for path in sorted(folder.glob(f"suite-{prompts}-{temperature}*.json")):
                rows |= _rows_of(json.loads(path.read_text("utf-8")))
            if rows:
                found[f"{name}, {label}"] = rows
    return found


def _rows_of(content: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    rows = {}
    for row in content["taus"]:
        setting = content["settings"][row["name"]]
        counts = setting["all_rounds"]["counts"]
        shares = {name: count / counts["committed"] for name, count in counts["accepted"].items()}
        # Files of before processor time was told were measured with nothing beside.
        speeds = setting.get("processor_speedups") or [setting["speedup"]]
        rows[row["name"]] = row | {"speed": statistics.median(speeds), "accepted": shares}
    return rows


def tables(columns: Mapping[str, Rows]) -> str:
    """A table for each profile, one of what each half of CORE knows, and one of categories, but of
    the rows between, where prompts have them."""
    parts = [table for profile in TITLES for table in _profile_table(profile, columns)]
    parts += _halves_table(columns)
    parts += [table for head, rows in columns.items() for table in _category_table(head, rows)]
    return "\n\n".join(parts)


def _profile_table(profile: str, columns: Mapping[str, Rows]) -> Iterator[str]:
    own = {head: rows for head, rows in columns.items() if _names(profile, rows)}
    if not own:
        return
    names = list(dict.fromkeys(name for rows in own.values() for name in _names(profile, rows)))
    cells = (_tau, _speed) if profile in TIMED else (_tau,)
    heads = [part for head in own for part in (head, "speed")[: len(cells)]]
    lines = [
        [name.partition(": ")[2], *(cell(rows, name) for rows in own.values() for cell in cells)]
        for name in names
    ]
    yield markdown_table([TITLES[profile], *heads], lines)


def _halves_table(columns: Mapping[str, Rows]) -> Iterator[str]:
    """Shares of all tokens: the first half of a row has all that it knew, the second the rest."""
    first, second = HALVES
    rows = {
        f"{half} {what}": (f"{PAPER}: CORE's halves, {row} first", HALVES[half])
        for half, other in ((first, second), (second, first))
        for what, row in (("knows", half), ("alone knows", other))
    }
    own = {
        head: found
        for head, found in columns.items()
        if all(name in found for name, _ in rows.values())
    }
    if own:
        lines = [
            [label, *(f"{found[name]['accepted'].get(source, 0.0):.0%}" for found in own.values())]
            for label, (name, source) in rows.items()
        ]
        yield markdown_table(["halves of the paper's CORE, of all tokens", *own], lines)


def _category_table(head: str, rows: Rows) -> Iterator[str]:
    categories = list(next(iter(rows.values()))["by_category"])
    if categories:
        lines = [
            [name, *(f"{row['by_category'][kind]['value']:.2f}" for kind in categories)]
            for name, row in rows.items()
            if name != TARGET_ONLY and not name.startswith(BETWEEN)
        ]
        yield markdown_table([head, *categories], lines)


def _names(profile: str, rows: Rows) -> list[str]:
    return [name for name in rows if name.startswith(f"{profile}: ")]


def _tau(rows: Rows, name: str) -> str:
    row = rows.get(name)
    if row is None:
        return "-"
    tau = Interval(**row["tau"])
    difference = None if name in FIRST else row["difference"]
    sign = SIGNS[Interval(**difference).verdict] if difference else ""
    return f"{tau.value:.2f} ({tau.low:.2f}-{tau.high:.2f}) {sign}".rstrip()


def _speed(rows: Rows, name: str) -> str:
    return f"{rows[name]['speed']:.2f}x" if name in rows else "-"


def main(
    *,
    folder: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Print the tables in Markdown."""
    print(tables(read_rows(folder)))


if __name__ == "__main__":
    typer.run(main)
