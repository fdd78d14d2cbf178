"""How well a replay without the target predicts tau: the suite of SPECTRA, measured and replayed.

python -m draftline.benchmarks.replay
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..bench.load import Load
from ..bench.machine import machine
from ..bench.summary import BenchResult
from ..deploy.bench_job import BenchJob
from ..deploy.bench_run import measure
from ..deploy.bench_suite import Stores, with_suite
from ..deploy.ray_runtime import quiet_libraries

RESULTS = Path(__file__).parent / "results" / "replay.json"


def _taus(result: BenchResult) -> dict[str, float]:
    """By setting."""
    return {
        one.name: one.whole.counts.tau for one in result.summaries if one.whole.counts is not None
    }


def _steps_a_second(result: BenchResult) -> dict[str, float]:
    """Of the engine without a target; the wall time of one request after the other."""
    return {
        one.name: one.rate / one.whole.counts.tau
        for one in result.summaries
        if one.whole.counts is not None
    }


def main(
    *,
    num_prompts: Annotated[int, typer.Option(help="Bundled prompts.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 1,
    unrefined_store: Annotated[
        str | None, typer.Option(help="Store of any perplexity, for the rows that need one.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = RESULTS,
) -> None:
    """Run the suite with the demo target, then on what it answered."""
    quiet_libraries()
    console = Console(width=100, highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "answers.jsonl"
        job = BenchJob(
            prompts=None,
            num_prompts=num_prompts,
            drafters=None,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=0,
            ignore_eos=True,
            rounds=1,
            load=Load(concurrency=concurrency),
        )
        stores = Stores("demo", unrefined_store)
        job, settings = with_suite(job, {"model": "demo"}, "spectra", stores, console.print)
        measured = asyncio.run(measure(replace(job, record=recording), settings, console))
        replayed = asyncio.run(measure(replace(job, replay=recording), settings, console))
    found, predicted = _taus(measured), _taus(replayed)
    speeds = _steps_a_second(replayed)
    table = Table("setting", "tau", "replayed", "difference", "steps/s of the replay", box=None)
    for name, tau in found.items():
        difference = f"{predicted[name] / tau - 1:+.1%}"
        table.add_row(
            name, f"{tau:.3f}", f"{predicted[name]:.3f}", difference, f"{speeds[name]:.0f}"
        )
    console.print(table)
    console.print(machine().line())
    content = {
        "machine": machine().fields(),
        "num_prompts": num_prompts,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "tau": found,
        "replayed_tau": predicted,
        "replayed_steps_a_second": speeds,
    }
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
