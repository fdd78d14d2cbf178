"""What a step takes of the engine's own thread outside model and drafters, and what a drafter takes
for all requests of a step: processor time, which other processes change least.

    python -m draftline.benchmarks.step.host_work
    python -m draftline.benchmarks.step.host_work --label new --before old.json

Loads and stand-ins are those of `simulated_pipeline.py` without stage times, texts and drafters
those of `draft_time.py`. Stand-ins for drafters and stages are on the same thread and counted. Two
versions are compared by turns: run the command in each of both trees; `--before` sets the runs of
an older file beside the new one.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ...core.step.builder import load_kernels
from ...measure.records.record import machine
from . import draft_time
from .simulated_pipeline import HOST, Bench, Load

RESULTS = Path(__file__).parents[1] / "results" / "host_work.json"
# Those that the default settings, or a goal, name.
DRAFTERS = ("prompt_lookup", "suffix", "spectra")
DRAFT_STEPS = 60
TOKENS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Processor time of a step, milliseconds: over all steps of all rounds, and the median of the
    round that was least disturbed."""

    load: str
    p10_ms: float
    p50_ms: float
    quiet_p50_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTime:
    """Processor time of one call for all requests, milliseconds: the least median of all rounds."""

    drafter: str
    requests: int
    propose_ms: float
    observe_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one call of this command measured."""

    label: str
    machine: str
    host: Sequence[HostTime]
    drafters: Sequence[DraftTime]


async def step_times(load: Load) -> list[float]:
    """Seconds of the thread from one step to the next while all requests of a load decode."""
    bench, seconds = Bench(load, TOKENS), []
    core = bench.core
    while bench.waiting:
        await core.step()
    num_steps, before = core.num_steps, time.thread_time()
    while not bench.has_finished:
        await core.step()
        if core.num_steps > num_steps:
            now = time.thread_time()
            seconds.append(now - before)
            num_steps, before = core.num_steps, now
    while core.has_work:
        await core.step()
    return seconds


def measure_host(rounds: int) -> list[HostTime]:
    """Every load, in turns."""
    found = [[asyncio.run(step_times(load)) for load in HOST] for _ in range(rounds)]
    return list(map(_host_time, HOST, zip(*found, strict=True)))


def _host_time(load: Load, rounds: Sequence[Sequence[float]]) -> HostTime:
    p10_ms, p50_ms = (1e3 * np.quantile(np.concatenate(rounds), [0.1, 0.5])).tolist()
    return HostTime(
        load=f"{load.requests} x {load.nodes}",
        p10_ms=p10_ms,
        p50_ms=p50_ms,
        quiet_p50_ms=1e3 * min(map(statistics.median, rounds)),
    )


def measure_drafters(rounds: int) -> list[DraftTime]:
    """Every drafter for each number of requests, in turns."""
    length = draft_time.CONTEXT_LEN + (DRAFT_STEPS + 1) * draft_time.STEP_LEN
    found = draft_time.texts(max(draft_time.REQUESTS), length)
    cells = [(count, name) for count in draft_time.REQUESTS for name in DRAFTERS]
    runs = [
        [draft_time.measure(name, found[:count], DRAFT_STEPS, time.thread_time)
         for count, name in cells]
        for _ in range(rounds)
    ]  # fmt: skip
    return [
        DraftTime(
            drafter=cell[0].drafter,
            requests=cell[0].requests,
            propose_ms=min(one.propose_p50_ms for one in cell),
            observe_ms=min(one.observe_p50_ms for one in cell),
        )
        for cell in zip(*runs, strict=True)
    ]


def _table(runs: Sequence[dict[str, Any]]) -> Table:
    """The figures of all runs side by side."""
    table = Table("", *(run["label"] for run in runs), box=None)
    _add_rows(table, runs, "host", ("load",), ("p10_ms", "p50_ms", "quiet_p50_ms"))
    _add_rows(table, runs, "drafters", ("requests", "drafter"), ("propose_ms", "observe_ms"))
    return table


def _add_rows(
    table: Table,
    runs: Sequence[dict[str, Any]],
    kind: str,
    names: Sequence[str],
    figures: Sequence[str],
) -> None:
    for row in runs[-1][kind]:
        name = [row[key] for key in names]
        cells = []
        for run in runs:
            same = [one for one in run[kind] if [one[key] for key in names] == name]
            shown = [f"{same[0][key]:.3f}" for key in figures if key in same[0]] if same else []
            cells.append(" / ".join(shown))
        table.add_row(" ".join(map(str, name)), *cells)


def main(
    rounds: Annotated[int, typer.Option(help="Runs of each load and drafter.")] = 5,
    label: Annotated[str, typer.Option(help="Names this run in the file.")] = "now",
    before: Annotated[
        Path | None, typer.Option(help="File of this command whose runs go first.")
    ] = None,
    host_only: Annotated[bool, typer.Option(help="No drafters.")] = False,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = RESULTS,
) -> None:
    """Measure the host's work."""
    runs: list[dict[str, Any]] = json.loads(before.read_text())["runs"] if before else []
    load_kernels()
    run = Run(
        label=label,
        machine=machine().line(),
        host=measure_host(rounds),
        drafters=() if host_only else measure_drafters(rounds),
    )
    runs = [one for one in runs if one["label"] != label] + [asdict(run)]
    console = Console(highlight=False)
    console.print(machine().line())
    console.print(
        "processor time, ms; host: p10 / p50 of a step, p50 of the quietest round; "
        "drafters: draft / commit"
    )
    console.print(_table(runs))
    output.write_text(json.dumps({"rounds": rounds, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
