"""Tables of the results of `draftline bench --suite`; docs/results.md shows some of their rows.

    python -m draftline.benchmarks.suite_tables spectra | heads | model-drafters

Reads the files of a suite in `benchmarks/results/`, as many as are there: those of each set of
prompts and temperature, `NAME-PROMPTS-TEMPERATURE.json`, of cost profiles, `...-PROFILE.json`, of
several rounds, `NAME-rounds-PROMPTS-TEMPERATURE-PROFILE.json`, and of numbers of streams,
`NAME-streams-N-PROMPTS-TEMPERATURE-PROFILE.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..deploy.cli.bench.suites import DRAFTLINE, MERGED, PAPER, UNTRAINED
from ..measure.clients.endpoint import TARGET_ONLY
from ..measure.simulate.cost_profile import bundled_profiles, read_cost_profile
from .pages import markdown_table

RESULTS = Path(__file__).parent / "results"
# Of the bundled model, but for the last, a chat model's bundled chats.
PROMPTS = {
    "bundled": "bundled",
    "humaneval": "HumanEval",
    "spec-bench": "Spec-Bench",
    "smollm2": "SmolLM2, chats",
}
TEMPERATURES = {"t0": "greedy", "t0.7": "T = 0.7", "t1": "T = 1"}
# The beginning of the names of SPECTRA's rows, and what they are.
TITLES = {
    f"{PAPER}: ": "drafters as the paper has them",
    f"{DRAFTLINE}: ": "draftline's defaults",
}

# The content of result files, by the heads of their columns.
Columns = Mapping[str, Mapping[str, Any]]


class Suite(StrEnum):
    """A suite, by its name in `draftline bench`."""

    SPECTRA = "spectra"
    HEADS = "heads"
    MODEL_DRAFTERS = "model-drafters"


# How the names of result files begin.
FILES = {Suite.SPECTRA: "suite", Suite.HEADS: "heads", Suite.MODEL_DRAFTERS: "models"}


def tables(folder: Path, suite: Suite) -> str:
    """tau of all rows, then simulated speeds by cost profile, in Markdown."""
    taus = _read_columns(folder, FILES[suite])
    parts: list[str] = []
    for start, title in (TITLES if suite is Suite.SPECTRA else {"": "tau"}).items():
        parts += _table(title, taus, _tau, start)
    rounds: dict[str, Columns] = {}
    streams: list[str] = []
    for profile in bundled_profiles():
        name = read_cost_profile(profile).name
        columns = _read_columns(folder, FILES[suite], profile)
        parts += _table(f"simulated speed: {name}", columns, _speed)
        rounds[name] = _read_columns(folder, f"{FILES[suite]}-rounds", profile)
        by_streams = _read_streams(folder, f"{FILES[suite]}-streams", profile)
        streams += _streams_table(name, by_streams)
    parts += _rounds_table({name: columns for name, columns in rounds.items() if columns})
    return "\n\n".join([*parts, *streams])


def _read_columns(folder: Path, name: str, profile: str = "") -> Columns:
    found = {}
    for prompts, shown in PROMPTS.items():
        for temperature, label in TEMPERATURES.items():
            path = folder / f"{name}-{prompts}-{temperature}{profile and f'-{profile}'}.json"
            if path.exists():
                found[f"{shown}, {label}"] = json.loads(path.read_text("utf-8"))
    return found


def _read_streams(folder: Path, name: str, profile: str) -> dict[int, Columns]:
    """The files of each number of streams, fewest first."""
    counts = {
        int(path.name.removeprefix(f"{name}-").partition("-")[0])
        for path in folder.glob(f"{name}-*-{profile}.json")
    }
    return {count: _read_columns(folder, f"{name}-{count}", profile) for count in sorted(counts)}


def _table(
    title: str, columns: Columns, cell: Callable[[Mapping[str, Any], str], str], start: str = ""
) -> Iterator[str]:
    """A row for each setting whose name begins with `start`, which it is shown without."""
    every = (row["name"] for content in columns.values() for row in content["taus"])
    names = [
        name for name in dict.fromkeys(every) if name != TARGET_ONLY and name.startswith(start)
    ]
    if names:
        lines = [
            [name.removeprefix(start), *(cell(content, name) for content in columns.values())]
            for name in names
        ]
        yield markdown_table([title, *columns], lines)


def _tau(content: Mapping[str, Any], name: str) -> str:
    """tau and its interval."""
    taus = {row["name"]: row["tau"] for row in content["taus"]}
    if name not in taus:
        return "-"
    return "{value:.2f} ({low:.2f}-{high:.2f})".format(**taus[name])


def _speed(content: Mapping[str, Any], name: str) -> str:
    """Speed over plain decoding."""
    setting = content["settings"].get(name)
    return "-" if setting is None else f"{setting['speedup']:.2f}x"


def _rounds_table(by_profile: Mapping[str, Columns]) -> Iterator[str]:
    """Rows without training and with everything: the mean of their rounds, and their range."""
    heads = list(dict.fromkeys(head for columns in by_profile.values() for head in columns))
    lines = []
    for profile, columns in by_profile.items():
        for name in (UNTRAINED, MERGED):
            cells = [_rounds(columns[head], name) if head in columns else "-" for head in heads]
            lines.append([f"{profile}; {name}", *cells])
    if lines:
        yield markdown_table(["simulated speed over several rounds", *heads], lines)


def _streams_table(name: str, by_streams: Mapping[int, Columns]) -> Iterator[str]:
    """A row for each number of streams, set of prompts, temperature and setting."""
    cells = "{tau:.2f}", "{kappa:.2f}", "{theta:.2f}", "{speedup:.2f}x"
    lines = [
        [f"{setting}, {head}; {streams}", *(cell.format(**row) for cell in cells)]
        for streams, columns in by_streams.items()
        for head, content in columns.items()
        for setting, row in content["settings"].items()
        if setting != TARGET_ONLY
    ]
    if lines:
        yield markdown_table([f"{name}; streams", "tau", "kappa", "theta", "speed-up"], lines)


def _rounds(content: Mapping[str, Any], name: str) -> str:
    speedups = content["settings"][name]["speedups"]
    mean = sum(speedups) / len(speedups)
    return f"{mean:.2f}x ({min(speedups):.2f}-{max(speedups):.2f})"


def main(
    suite: Annotated[Suite, typer.Argument(help="Of `draftline bench --suite`.")],
    *,
    folder: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Print the tables in Markdown."""
    print(tables(folder, suite))


if __name__ == "__main__":
    typer.run(main)
