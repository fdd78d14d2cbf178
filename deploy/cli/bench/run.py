"""`draftline bench` measures, `draftline lossless` checks; both print and write what they find."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from ....core.errors import ConfigError
from ....measure.clients.endpoint import TARGET_ONLY, DrawingEndpoint, Setting, matched_settings
from ....measure.clients.engine_endpoint import EngineEndpoint
from ....measure.clients.http_endpoint import HttpEndpoint
from ....measure.prompts import BenchPrompt, spread
from ....measure.records import machine
from ....measure.replay.recording import read_recording
from ....measure.report.lossless_report import LosslessReport
from ....measure.report.plots import require_matplotlib, write_plots
from ....measure.report.summary import BenchResult, summarise, tau_rows
from ....measure.report.tables import print_result
from ....measure.runs.lossless import check_answers, check_first_token, check_seeds
from ....measure.runs.matched import Runs, differences, run_matched
from ....models.load.checkpoint import answers_chats
from ...engine.async_engine import AsyncEngine
from ...ray_serve.runtime import quiet_libraries
from ...settings.settings import build_serve_args
from ..progress import progress
from .endpoints import CHAT_FRAME, BenchTargets, bench_prompts, open_engines, open_server, that_fit
from .job import BenchJob, LosslessJob


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
    lengths = {
        setting.name: setting.draft_length
        for setting in bench.endpoints
        if setting.draft_length is not None
    }
    return BenchResult(what, summaries, faults, taus, measured.draft_ms, lengths)


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


def run_lossless(job: LosslessJob, settings: Mapping[str, Any], console: Console) -> int:
    """Check, print, write; 0 if nothing differs, else 1. Raises `DraftlineError`."""
    quiet_libraries()
    report = asyncio.run(_check(job, settings))
    report.print(console)
    if job.output is not None:
        job.output.parent.mkdir(parents=True, exist_ok=True)
        job.output.write_text(json.dumps(report.fields(), indent=1) + "\n", encoding="utf-8")
        console.print(f"wrote {job.output}")
    return 0 if report.is_lossless else 1


@dataclass(frozen=True, slots=True)
class _Checked:
    """The endpoint and its settings, the target alone first; `what` describes it in JSON."""

    endpoint: DrawingEndpoint
    ways: Sequence[Setting]
    prompts: Sequence[BenchPrompt]
    what: dict[str, Any]
    is_chat: bool = False


async def _check(job: LosslessJob, settings: Mapping[str, Any]) -> LosslessReport:
    if job.base_url is not None:
        opened = _open_server(job, job.base_url)
    else:
        opened = _open_engine(job, settings)
    async with opened as checked:
        endpoint, ways = checked.endpoint, checked.ways
        checks = await check_answers(
            endpoint,
            ways,
            checked.prompts,
            max_tokens=job.max_tokens,
            together=job.concurrency,
            is_chat=checked.is_chat,
            progress=progress,
        )
        plain, drafted = ways[0], ways[-1]
        seeds = await check_seeds(
            endpoint,
            plain,
            drafted,
            seeds=job.seeds,
            together=job.concurrency,
            progress=progress,
        )
        first = await check_first_token(endpoint, drafted, seeds=job.seeds, progress=progress)
    return LosslessReport(checked.what, checks, seeds, first)


@asynccontextmanager
async def _open_server(job: LosslessJob, url: str) -> AsyncIterator[_Checked]:
    async with HttpEndpoint(url, job.api_key) as endpoint:
        info = (await endpoint.connect(job.model)).info
        if not info.is_draftline:
            raise ConfigError("base-url", f"{url} is no draftline server")
        ways = matched_settings(info.drafters, job.drafters)
        if len(ways) == 1:
            raise ConfigError("base-url", f"{url} has no drafters, so nothing can differ")
        what = {"base_url": url, "model": info.model, "drafters": list(info.drafters)}
        prompts = _prompts(job, is_chat=info.is_chat)
        yield _Checked(endpoint, ways, prompts, what, info.is_chat)


@asynccontextmanager
async def _open_engine(job: LosslessJob, settings: Mapping[str, Any]) -> AsyncIterator[_Checked]:
    # With drafts that do not pay left out, a check might have no drafts and prove nothing.
    config = build_serve_args({"node_budget": "full", **settings}).engine
    drafters = [drafter.source for drafter in config.drafters]
    ways = matched_settings(drafters, job.drafters)
    if len(ways) == 1:
        raise ConfigError("drafters", "there are none, so nothing can differ")
    engine = AsyncEngine(config)
    with progress("starting", total=1, unit="engines"):
        await engine.start()
    try:
        endpoint = EngineEndpoint(engine, per_request=True, tokenizer=engine.tokenizer)
        is_chat = answers_chats(config.model)
        turns, frame = (2, CHAT_FRAME) if is_chat else (1, 0)
        prompts = _prompts(job, is_chat=is_chat)
        fit = that_fit(prompts, engine, job.max_tokens, turns=turns, frame=frame)
        what = {"model": config.model, "drafters": drafters}
        yield _Checked(endpoint, ways, fit, what, is_chat)
    finally:
        await engine.close()


def _prompts(job: LosslessJob, *, is_chat: bool) -> list[BenchPrompt]:
    return spread(bench_prompts(job.prompts, is_chat=is_chat), job.num_prompts)


FAMILY, RESULT = "draftline:shadow_requests", "result"
MEANINGS = {
    "same": "every token is the target's own",
    "near_tie": "differ where two scores are within rounding",
    "differs": "differ where they are not: a fault",
    "unknown": "differ, and parameters of the request change scores",
    "failed": "the repetition ended with an error",
    "skipped": "others were waiting, or a repetition was running",
}
TIMEOUT_S = 10.0


def run_shadow(job: LosslessJob, console: Console) -> int:
    """Print the counts; 1 where an answer differs that should not, or none was compared yet.

    Raises `ConfigError`.
    """
    counts = _counts(job)
    table = Table("requests", "result", "meaning", box=None)
    for result, meaning in MEANINGS.items():
        table.add_row(f"{counts.get(result, 0):,}", result, meaning)
    console.print(table)
    compared = sum(counts.get(name, 0) for name in ("same", "near_tie", "differs", "unknown"))
    if not compared:
        console.print("none was compared yet; is the server's shadow_rate above 0?")
    return int(not compared or bool(counts.get("differs")))


def _counts(job: LosslessJob) -> Mapping[str, int]:
    if job.base_url is None:
        raise ConfigError("shadow", "is what a server counted: give its --base-url")
    url = job.base_url.rstrip("/").removesuffix("/v1") + "/metrics"
    headers = {} if job.api_key is None else {"Authorization": f"Bearer {job.api_key}"}
    try:
        answer = httpx.get(url, headers=headers, timeout=TIMEOUT_S)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise ConfigError("base-url", f"{url} does not answer: {error}") from error
    counts: dict[str, int] = {}
    try:
        families = [f for f in text_string_to_metric_families(answer.text) if f.name == FAMILY]
    except ValueError as error:
        raise ConfigError("base-url", f"{url} has no metrics of draftline") from error
    for sample in (sample for family in families for sample in family.samples):
        if sample.name.endswith("_total"):
            result = sample.labels[RESULT]
            counts[result] = counts.get(result, 0) + int(sample.value)
    if not families:
        raise ConfigError("base-url", f"{url} has no {FAMILY}_total: it is no draftline server")
    return counts
