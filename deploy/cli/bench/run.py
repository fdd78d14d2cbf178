"""`draftline bench`: measures, prints, writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from ....core.errors import ConfigError
from ....measure.clients.endpoint import TARGET_ONLY
from ....measure.prompts import BenchPrompt, spread
from ....measure.records import machine
from ....measure.replay.recording import read_recording
from ....measure.report.plots import require_matplotlib, write_plots
from ....measure.report.summary import BenchResult, summarise, tau_rows
from ....measure.report.tables import print_result
from ....measure.runs.matched import Runs, differences, run_matched
from ...ray_serve.runtime import quiet_libraries
from ..progress import progress
from .endpoints import BenchTargets, open_engines, open_server
from .job import BenchJob
from .prompts import bench_prompts


def run_bench(job: BenchJob, settings: Mapping[str, Any], console: Console) -> int:
    """Measure, print, write; 1 where an answer differs from the target's own, else 0.

    Raises `DraftlineError`.
    """
    quiet_libraries()
    if job.plots is not None:
        require_matplotlib()
    result = asyncio.run(measure(job, settings, console))
    print_result(result, console)
    console.print(machine().line())
    if job.output is not None:
        job.output.parent.mkdir(parents=True, exist_ok=True)
        job.output.write_text(json.dumps(result.fields(), indent=1) + "\n", encoding="utf-8")
        console.print(f"wrote {job.output}")
    if job.plots is not None:
        for path in write_plots(result, job.plots):
            console.print(f"wrote {path}")
    return 1 if result.faults else 0


async def measure(job: BenchJob, settings: Mapping[str, Any], console: Console) -> BenchResult:
    """Run everything that a job asks for, and print its progress. Raises `DraftlineError`."""
    measured = await measured_runs(job, settings, console)
    job, bench, runs = measured.job, measured.bench, measured.runs
    what = {"machine": machine().fields(), "of": bench.what, "load": _load_fields(job)}
    # Under other rules answers have the target's distribution, but are not its own for a seed.
    own = {
        setting.name: runs[setting.name]
        for setting in bench.endpoints
        if setting.acceptance is None or not job.temperature
    }
    faults = tuple(differences(own, TARGET_ONLY, bench.explain)) if bench.compares else None
    taus = tau_rows(runs, [prompt.category for prompt in bench.plan.prompts])
    summaries = summarise(runs, TARGET_ONLY)
    return BenchResult(what, summaries, faults, taus, measured.draft_ms)


@dataclass(frozen=True, slots=True)
class BenchRuns:
    """What was measured.

    job       with a recording's parameters where it replays one
    draft_ms  milliseconds of a draft, by setting and drafter
    """

    job: BenchJob
    bench: BenchTargets
    runs: Runs
    draft_ms: Mapping[str, Mapping[str, float]]


async def measured_runs(job: BenchJob, settings: Mapping[str, Any], console: Console) -> BenchRuns:
    """Run every setting of a job. Raises `DraftlineError`."""
    recording = None if job.replay is None else read_recording(job.replay)
    if not (job.asks_plainly or (job.record is None and job.replay is None)):
        raise ConfigError("record", "and --replay hold single answers: no turns, chat or dataset's")
    if recording is not None:
        prompts = [BenchPrompt(answer.name, answer.prompt) for answer in recording.answers]
        job = job.as_recorded(recording)
    else:
        prompts = spread(bench_prompts(job.prompts, job.dataset, is_chat=job.chat), job.num_prompts)
    if job.base_url is not None:
        opened = open_server(job, prompts)
    else:
        opened = open_engines(job, settings, prompts, recording)
    async with opened as bench:
        console.print(_headline(bench, len(prompts)))
        runs = await run_matched(bench.endpoints, bench.plan, progress)
        if bench.profile is not None:
            console.print(f"simulated times: {bench.profile.name}")
        return BenchRuns(job, bench, runs, bench.draft_ms())


def _headline(bench: BenchTargets, num_prompts: int) -> str:
    plan, load = bench.plan, bench.plan.load
    if load.request_rate is None:
        how = "at their own times" if load.arrivals else f"{load.concurrency} at once"
    else:
        how = f"{load.request_rate:g} a second"
    left_out = num_prompts - len(plan.prompts)
    too_long = f" ({left_out} too long for the context left out)" if left_out else ""
    return (
        f"{len(plan.prompts)} prompts{too_long}, {plan.max_tokens} tokens each, {how}, "
        f"temperature {plan.temperature:g}, {plan.rounds} rounds of: "
        f"{', '.join(setting.name for setting in bench.endpoints)}"
    )


def _load_fields(job: BenchJob) -> dict[str, Any]:
    return {
        "prompts": "bundled" if job.prompts is None else job.prompts.name,
        "dataset": job.dataset,
        "num_prompts": job.num_prompts,
        "turns": job.turns,
        "chat": job.chat,
        "dataset_lengths": job.dataset_lengths,
        "dataset_times": job.dataset_times,
        "max_tokens": job.max_tokens,
        "temperature": job.temperature,
        "seed": job.seed,
        "ignore_eos": job.ignore_eos,
        "rounds": job.rounds,
        "cost_profile": job.cost_profile,
        "small_model": job.small_model,
        "host_slowdown": job.host_slowdown,
        "concurrency": job.load.concurrency,
        "request_rate": job.load.request_rate,
    }
