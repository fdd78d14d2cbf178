"""Tables of the results of `draftline bench --suite model-drafters`.

    python -m draftline.benchmarks.model_drafters.tables

Reads `models-bundled-TEMPERATURE.json` of `benchmarks/results/`, those of cost profiles,
`models-bundled-TEMPERATURE-PROFILE.json`, and `models-acceptance.json`, as many as are there, and
prints their tables. docs/results.md shows some rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ...measure.report.marked_part import markdown_table
from ...measure.simulate.cost_profile import SMALL_MODEL, bundled_profiles, read_cost_profile
from ..heads.tables import (
    RESULTS,
    Columns,
    depth_table,
    names_of,
    read_columns,
    speed_cell,
    table,
    tau_cell,
)

SUITE = "models"


def tables(folder: Path) -> str:
    """tau; acceptance by depth, expected and measured; simulated speeds."""
    real = read_columns(folder, suite=SUITE)
    parts = [table("tau", real, tau_cell)] if real else []
    parts += [depth_table(name, content) for name, content in real.items()]
    expected = folder / "models-acceptance.json"
    if expected.exists():
        parts.append(_acceptance(json.loads(expected.read_text("utf-8")), real))
    for profile in bundled_profiles():
        simulated = read_columns(folder, profile, SUITE)
        if simulated:
            known = read_cost_profile(profile)
            parts.append(table(f"simulated speed: {known.name}", simulated, speed_cell))
            parts.append(_simulated(simulated))
    return "\n\n".join(parts) or "Not measured yet."


def _simulated(columns: Columns) -> str:
    """The best row of each run, and those that are no faster than plain decoding."""
    lines = []
    for label, content in columns.items():
        speeds = {name: content["settings"][name]["speedup"] for name in names_of({"": content})}
        best = max(speeds, key=lambda name: speeds[name])
        below = [f"{name} ({speed:.2f})" for name, speed in speeds.items() if speed < 1]
        drafter = content["load"]["small_model"] or SMALL_MODEL
        fastest = f"{best} ({speeds[best]:.2f})"
        lines.append([label, fastest, ", ".join(below) or "none", drafter])
    return markdown_table(["simulated", "fastest", "below 1", "drafter"], lines)


def _acceptance(content: Mapping[str, Any], real: Columns) -> str:
    """The first token of a draft: what is to be expected, and the share that was accepted."""
    lines = []
    for row in content["rows"]:
        for temperature, expected in row["expected"].items():
            label = "greedy" if float(temperature) == 0 else f"T = {float(temperature):g}"
            measured = real.get(f"bundled, {label}", {})
            lines.append(
                [row["name"], label, f"{expected:.2f}", _first_share(measured, row["name"])]
            )
    return markdown_table(["first token accepted", "", "expected", "measured"], lines)


def _first_share(content: Mapping[str, Any], name: str) -> str:
    if not content or name not in names_of({"": content}):
        return "-"
    lengths = content["settings"][name]["all_rounds"]["counts"]["lengths"]
    return f"{sum(lengths[1:]) / sum(lengths):.2f}"


def main(
    *,
    folder: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Print the tables in Markdown."""
    print(tables(folder))


if __name__ == "__main__":
    typer.run(main)
