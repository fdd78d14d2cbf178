"""How well a replay without the target predicts tau: the suite of SPECTRA, measured and replayed.

    python -m draftline.benchmarks.retrieval.replay

The recording heard what the target said to the suite's drafters, and not to a few more.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ...cluster.config import DrafterConfig
from ...deploy.cli.bench.job import BenchJob
from ...deploy.cli.bench.run import measure
from ...deploy.cli.bench.suite import with_suite
from ...deploy.cli.bench.suite_rows import TREE_NODES
from ...deploy.ray_serve.runtime import quiet_libraries
from ...measure.clients.setting import TARGET_ONLY, Setting
from ...measure.records.record import machine
from ...measure.report.summary import BenchResult

RESULTS = Path(__file__).parents[1] / "results" / "replay.json"


def _unheard(kind: str, name: str, **options: Any) -> DrafterConfig:
    return DrafterConfig(kind=kind, name=name, max_nodes=TREE_NODES, **options)


# Drafters that ask the target for predictions, in settings that no row of the suite has.
UNHEARD = {
    "Lookahead, window 10": _unheard("lookahead", "window-10", window=10, guess_set_size=10),
    "Lookahead, n-grams of 4": _unheard(
        "lookahead", "ngram-4", window=15, guess_set_size=15, ngram=4
    ),
    "CORE without backward, window 10": _unheard(
        "spectra", "core-window-10", window=10, backward=False
    ),
    "token recycling, 4 top next tokens": _unheard(
        "token_recycling", "top_next_tokens-4", num_top_next_tokens=4
    ),
}


def _settings(drafters: Mapping[str, DrafterConfig]) -> tuple[Setting, ...]:
    rows = (Setting(name, (one.source,)) for name, one in drafters.items())
    return (Setting(TARGET_ONLY, ()), *rows)


def _all(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    return {name: value for part in parts for name, value in part.items()}


def _taus(result: BenchResult) -> dict[str, float]:
    """By setting."""
    return {
        one.name: one.whole.counts.tau for one in result.summaries if one.whole.counts is not None
    }


def _steps_a_second(result: BenchResult) -> dict[str, float]:
    """Steps a second of the engine without a target, one request after the other, by setting."""
    return {
        one.name: one.rate / one.whole.counts.tau
        for one in result.summaries
        if one.whole.counts is not None
    }


def main(
    *,
    num_prompts: Annotated[int, typer.Option(help="Bundled prompts.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 96,
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
            num_prompts=num_prompts,
            max_tokens=max_tokens,
            temperature=temperature,
            rounds=1,
            concurrency=concurrency,
            suite="spectra",
            profile="draftline",
            store="demo",
            unrefined_store=unrefined_store,
        )
        job, settings = with_suite(job, {"model": "demo"}, console.print)
        others = replace(job, rows=_settings(UNHEARD))
        other_settings = settings | {"drafters": tuple(UNHEARD.values())}
        measured = [
            asyncio.run(measure(replace(job, record=recording), settings, console)),
            asyncio.run(measure(others, other_settings, console)),
        ]
        replayed = [
            asyncio.run(measure(replace(job, replay=recording), settings, console)),
            asyncio.run(measure(replace(others, replay=recording), other_settings, console)),
        ]
    found, predicted = _all(map(_taus, measured)), _all(map(_taus, replayed))
    speeds = _all(map(_steps_a_second, replayed))
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
        "unheard": list(UNHEARD),
        "tau": found,
        "replayed_tau": predicted,
        "replayed_steps_a_second": speeds,
    }
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
