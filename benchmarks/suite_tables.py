"""Tables of the results of `draftline bench --suite`; docs/results.md shows some of their rows.

    python -m draftline.benchmarks.suite_tables spectra | heads | model-drafters

Reads the files of a suite in `benchmarks/results/`, as many as are there: those of each set of
prompts and temperature, `NAME-PROMPTS-TEMPERATURE.json`, and of numbers of streams by a cost
profile, `NAME-streams-N-PROMPTS-TEMPERATURE-PROFILE.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..deploy.cli.bench.suites import DRAFTLINE, PAPER
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
    """tau of all rows, then the speeds of numbers of streams, in Markdown."""
    taus = _read_columns(folder, FILES[suite])
    parts: list[str] = []
    for start, title in (TITLES if suite is Suite.SPECTRA else {"": "tau"}).items():
        parts += _table(title, taus, start)
    for profile in bundled_profiles():
        by_streams = _read_streams(folder, f"{FILES[suite]}-streams", profile)
        parts += _streams_table(read_cost_profile(profile).name, by_streams)
    return "\n\n".join(parts)


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


def _table(title: str, columns: Columns, start: str) -> Iterator[str]:
    """A row for each setting whose name begins with `start`, which it is shown without."""
    every = (row["name"] for content in columns.values() for row in content["taus"])
    names = [
        name for name in dict.fromkeys(every) if name != TARGET_ONLY and name.startswith(start)
    ]
    if names:
        lines = [
            [name.removeprefix(start), *(_tau(content, name) for content in columns.values())]
            for name in names
        ]
        yield markdown_table([title, *columns], lines)


def _tau(content: Mapping[str, Any], name: str) -> str:
    """tau and its interval."""
    taus = {row["name"]: row["tau"] for row in content["taus"]}
    if name not in taus:
        return "-"
    return "{value:.2f} ({low:.2f}-{high:.2f})".format(**taus[name])


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


def main(
    suite: Annotated[Suite, typer.Argument(help="Of `draftline bench --suite`.")],
    *,
    folder: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Print the tables in Markdown."""
    print(tables(folder, suite))


if __name__ == "__main__":
    typer.run(main)
