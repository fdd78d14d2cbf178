"""The tables of docs/results.md from results of `draftline bench --suite model-drafters`.

    python -m draftline.benchmarks.model_drafters.tables

Reads `models-bundled-TEMPERATURE.json` of `benchmarks/results/`, those of cost profiles,
`models-bundled-TEMPERATURE-PROFILE.json`, `models-acceptance.json` and `hidden_share.json`, as many
as are there, and replaces the tables between two marks in docs/results.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ...measure.report.marked_part import markdown_table, replaced
from ...measure.simulate.cost_profile import SMALL_MODEL, bundled_profiles, read_cost_profile
from ..heads.tables import (
    PAGE,
    RESULTS,
    Columns,
    depth_table,
    names_of,
    read_columns,
    speed_cell,
    table,
    tau_cell,
)

PART = "model drafters"
SUITE = "models"


def tables(folder: Path) -> str:
    """tau; acceptance by depth, expected and measured; simulated speeds; hidden shares."""
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
    hidden = folder / "hidden_share.json"
    if hidden.exists():
        parts.append(_hidden(json.loads(hidden.read_text("utf-8"))))
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


def _hidden(content: Mapping[str, Any]) -> str:
    return markdown_table(
        ["drafter", "requests at once", "T", "outcomes drafted behind", "hidden",
         "waited, ms a token", "of what it waits without", "drafted, ms a token", "tau", "tokens/s",
         "guessed"],
        [*_hidden_lines(content)],
    )  # fmt: skip


def _hidden_lines(content: Mapping[str, Any]) -> Iterator[list[str]]:
    every = [one for run in content.values() for one in run["cases"]]
    waited = {tuple(one["case"].values()): one["wait_ms"] for one in every}
    for one in every:
        case = one["case"]
        is_ahead = case["outcomes"] > 0
        without = waited[tuple((case | {"outcomes": 0}).values())]
        used = f"{one['ahead_used']} of {one['ahead']}" if is_ahead else ""
        yield [
            case["drafter"], str(case["together"]), f"{case['temperature']:g}",
            str(case["outcomes"] or "off"), f"{one['hidden']:.0%}", f"{one['wait_ms']:.1f}",
            f"{one['wait_ms'] / without:.0%}" if is_ahead else "", f"{one['draft_ms']:.1f}",
            f"{one['tau']:.2f}", f"{one['tokens_s']:.0f}", used,
        ]  # fmt: skip


def main(
    *,
    folder: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
    page: Annotated[Path, typer.Option(help="Page with the marks.")] = PAGE,
) -> None:
    """Write the tables."""
    text = page.read_text("utf-8")
    page.write_text(replaced(text, tables(folder), PART), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
