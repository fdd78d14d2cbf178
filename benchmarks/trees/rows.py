"""Rows of settings that differ in their engines: tau with intervals, and speed."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ...cluster.config import DrafterConfig
from ...core.arrays import Float64
from ...deploy.cli.bench.job import BenchJob
from ...deploy.cli.bench.run import measured_runs
from ...measure.clients.setting import TARGET_ONLY, Setting
from ...measure.report.intervals import counts_of, drawn_taus, interval

MODEL = "model"


@dataclass(frozen=True, slots=True)
class Case:
    """One engine: its drafter's options, and settings of its own."""

    name: str
    drafter: Mapping[str, Any]
    engine: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """What a case gave.

    counts   float64 [prompts, 2]  committed tokens and steps
    speedup  over plain decoding, median of the rounds
    """

    case: Case
    counts: Float64
    speedup: float


def measured(job: BenchJob, cases: Sequence[Case], console: Console) -> list[Found]:
    """Every case beside plain decoding, in an engine of its own."""
    found = []
    for case in cases:
        drafter = DrafterConfig(kind="model", name=MODEL, model="demo-drafter", **case.drafter)
        rows = (Setting(TARGET_ONLY, ()), Setting(case.name, (MODEL,)))
        settings = {"model": "demo", "drafters": (drafter,), **case.engine}
        runs = asyncio.run(measured_runs(replace(job, rows=rows), settings, console)).runs
        counts = counts_of(runs[case.name])
        assert counts is not None
        pairs = zip(runs[case.name], runs[TARGET_ONLY], strict=True)
        speedups = [a.metrics.output_throughput / b.metrics.output_throughput for a, b in pairs]
        found.append(Found(case, counts, statistics.median(speedups)))
    return found


def fields(found: Sequence[Found], reference: str) -> list[dict[str, Any]]:
    """tau of each case and its difference to that of `reference`, on the same draws of prompts."""
    totals = np.stack([one.counts for one in found])
    whole, drawn = drawn_taus(totals)
    at = [one.case.name for one in found].index(reference)
    return [
        {
            "name": one.case.name,
            "tau": asdict(interval(whole[row], drawn[:, row])),
            "beyond": asdict(interval(whole[row] - whole[at], drawn[:, row] - drawn[:, at])),
            "speedup": one.speedup,
        }
        for row, one in enumerate(found)
    ]


def show(rows: Sequence[Mapping[str, Any]], title: str, reference: str, console: Console) -> None:
    """Print the rows."""
    table = Table("", "tau", f"beyond {reference}", "speedup", box=None, title=title,
                  title_justify="left")  # fmt: skip
    for row in rows:
        table.add_row(
            row["name"], _shown(row["tau"], ""), _shown(row["beyond"], "+"),
            f"{row['speedup']:.2f}x",
        )  # fmt: skip
    console.print(table)


def _shown(one: Mapping[str, float], sign: str) -> str:
    return f"{one['value']:{sign}.3f} ({one['low']:{sign}.3f} - {one['high']:{sign}.3f})"
