"""Tables of the results of `draftline bench --suite heads`.

    python -m draftline.benchmarks.heads.tables

Reads `heads-PROMPTS-TEMPERATURE.json` of `benchmarks/results/`, those of cost profiles,
`heads-PROMPTS-TEMPERATURE-PROFILE.json`, those of several rounds of the rows without training and
with everything, `heads-rounds-PROMPTS-TEMPERATURE-PROFILE.json`, and those of chains of so many
nodes under load, `heads-load-REQUESTS-PROFILE.json`, as many as are there, and prints their tables.
docs/results.md shows some rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ...deploy.cli.bench.suites import MERGED, UNTRAINED
from ...measure.clients.setting import TARGET_ONLY
from ...measure.report.intervals import Interval
from ...measure.report.marked_part import markdown_table
from ...measure.simulate.cost_profile import bundled_profiles, read_cost_profile

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# Of the bundled model, but for the last, a chat model's bundled chats.
PROMPTS = {
    "bundled": "bundled",
    "humaneval": "HumanEval",
    "spec-bench": "Spec-Bench",
    "smollm2": "SmolLM2, chats",
}
TEMPERATURES = {"t0": "greedy", "t0.7": "T = 0.7", "t1": "T = 1"}
SHOWN_DEPTHS = 6
LOADS = (1, 8, 32)

# What a file says, by what its column is headed.
Columns = Mapping[str, Mapping[str, Any]]


def read_columns(
    folder: Path, profile: str = "", suite: str = "heads"
) -> dict[str, Mapping[str, Any]]:
    """The files of one cost profile, or of none."""
    found = {}
    for prompts, name in PROMPTS.items():
        for temperature, label in TEMPERATURES.items():
            path = folder / f"{suite}-{prompts}-{temperature}{profile and f'-{profile}'}.json"
            if path.exists():
                found[f"{name}, {label}"] = json.loads(path.read_text("utf-8"))
    return found


def read_loads(folder: Path, profile: str) -> dict[str, Mapping[str, Any]]:
    """The files of so many requests at once."""
    paths = {count: folder / f"heads-load-{count}-{profile}.json" for count in LOADS}
    return {
        f"{count} at once": json.loads(path.read_text("utf-8"))
        for count, path in paths.items()
        if path.exists()
    }


def tables(folder: Path) -> str:
    """tau; acceptance by depth and time of the first file; speeds of each profile."""
    real = read_columns(folder)
    parts = [table("tau", real, tau_cell)]
    head, content = next(iter(real.items()))
    parts.append(depth_table(head, content))
    by_profile: dict[str, Columns] = {}
    rounds: dict[str, Columns] = {}
    for profile in bundled_profiles():
        name = read_cost_profile(profile).name
        several = read_columns(folder, profile, "heads-rounds")
        if several:
            rounds[name] = several
        simulated = read_columns(folder, profile)
        if simulated:
            by_profile[name] = simulated
            parts.append(table(f"simulated speed: {name}", simulated, speed_cell))
        loads = read_loads(folder, profile)
        if loads:
            title = f"chains under load, kappa, speed-up, theta: {name}"
            parts.append(table(title, loads, _kappa))
    if rounds:
        parts.append(rounds_table(rounds))
    if MERGED in content["settings"] and by_profile:
        parts.append(break_even_table(real, by_profile))
    return "\n\n".join(parts)


def table(title: str, columns: Columns, cell: Any) -> str:
    """A row for each setting, `cell(content, name)` for each file."""
    names = names_of(columns)
    lines = [[name, *(cell(content, name) for content in columns.values())] for name in names]
    return markdown_table([title, *columns], lines)


def names_of(columns: Columns) -> list[str]:
    """Rows in the order of the first file that has them."""
    names = (row["name"] for content in columns.values() for row in content["taus"])
    return [name for name in dict.fromkeys(names) if name != TARGET_ONLY]


def tau_cell(content: Mapping[str, Any], name: str) -> str:
    """tau and its interval."""
    for row in content["taus"]:
        if row["name"] == name:
            tau = Interval(**row["tau"])
            return f"{tau.value:.2f} ({tau.low:.2f}-{tau.high:.2f})"
    return "-"


def speed_cell(content: Mapping[str, Any], name: str) -> str:
    """Speed over plain decoding."""
    setting = content["settings"].get(name)
    return "-" if setting is None else f"{setting['speedup']:.2f}x"


def rounds_table(by_profile: Mapping[str, Columns]) -> str:
    """The rows without training and with everything: the mean of their rounds, and their range."""
    heads = list(dict.fromkeys(head for columns in by_profile.values() for head in columns))
    lines = []
    for profile, columns in by_profile.items():
        for name in (UNTRAINED, MERGED):
            cells = [_rounds(columns[head], name) if head in columns else "-" for head in heads]
            lines.append([f"{profile}; {name}", *cells])
    return markdown_table(["simulated speed over several rounds", *heads], lines)


def _rounds(content: Mapping[str, Any], name: str) -> str:
    speedups = content["settings"][name]["speedups"]
    mean = sum(speedups) / len(speedups)
    return f"{mean:.2f}x ({min(speedups):.2f}-{max(speedups):.2f})"


def break_even_table(real: Columns, by_profile: Mapping[str, Columns]) -> str:
    """Tokens that a draft of one trained drafter has to bring beyond the training-free ones to be
    worth its time, beside what all of them together bring, at any cost; by profile and prompts."""
    compared = [
        (f"{profile}; {head}", content, real[head])
        for profile, columns in by_profile.items()
        for head, content in columns.items()
        if {MERGED, UNTRAINED} <= real.get(head, {}).get("settings", {}).keys()
    ]
    names = [
        name
        for name in names_of({title: content for title, content, _ in compared})
        if all(len(content["draft_ms"].get(name, ())) == 1 for _, content, _ in compared)
    ]
    lines = []
    for title, content, at_any_cost in compared:
        taus = {row["name"]: row["tau"]["value"] for row in at_any_cost["taus"]}
        needed = [f"{_needed(content, name):.2f}" for name in names]
        lines.append([title, *needed, f"{taus[MERGED] - taus[UNTRAINED]:.2f}"])
    return markdown_table(["tokens that a draft must bring", *names, "all of them bring"], lines)


def _needed(content: Mapping[str, Any], name: str) -> float:
    """Tokens that are decoded in the time of a row's draft with training-free drafts alone."""
    [draft_ms] = content["draft_ms"][name].values()
    return draft_ms / 1000 * content["settings"][UNTRAINED]["output_throughput"]


def _kappa(content: Mapping[str, Any], name: str) -> str:
    """SpecFormer's measures: kappa, tokens a step for each node that a draft of its length may
    have, which of a chain is tau; the speed-up; and how much of kappa a speed-up of 1 takes."""
    setting = content["settings"].get(name)
    if setting is None:
        return "-"
    [kappa] = [row["tau"]["value"] for row in content["taus"] if row["name"] == name]
    speedup = setting["speedup"]
    return f"{kappa:.2f}, {speedup:.2f}x, {kappa / speedup:.2f}"


def depth_shares(content: Mapping[str, Any], name: str, most: int) -> list[float]:
    """Share of a row's steps that accepted a node at each depth, from 1 to `most`."""
    lengths = content["settings"][name]["all_rounds"]["counts"]["lengths"]
    return [sum(lengths[depth:]) / sum(lengths) for depth in range(1, most + 1)]


def depth_table(head: str, content: Mapping[str, Any]) -> str:
    """Share of steps that accepted a node at each depth, and milliseconds of a draft here."""
    lines = []
    for name in names_of({head: content}):
        shares = depth_shares(content, name, SHOWN_DEPTHS)
        times = content["draft_ms"].get(name, {})
        drafters = content["settings"][name]["all_rounds"]["counts"]["drafted"]
        spent = sum(times.get(drafter, 0.0) for drafter in drafters)
        lines.append([name, *(f"{share:.2f}" for share in shares), f"{spent:.1f}"])
    depths = [str(depth) for depth in range(1, SHOWN_DEPTHS + 1)]
    return markdown_table([f"accepted at depth; {head}", *depths, "ms a draft"], lines)


def main(
    *,
    folder: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Print the tables in Markdown."""
    print(tables(folder))


if __name__ == "__main__":
    typer.run(main)
