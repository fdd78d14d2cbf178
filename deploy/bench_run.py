"""`draftline bench`: puts engines or a server, prompts and matched runs together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from ..bench.endpoint import Endpoint
from ..bench.engine_endpoint import EngineEndpoint
from ..bench.equality import Explain, differences
from ..bench.http_endpoint import HttpEndpoint
from ..bench.judge_runs import explain_by_model
from ..bench.load import Load
from ..bench.machine import machine
from ..bench.matched import Plan, run_matched
from ..bench.plots import require_matplotlib, write_plots
from ..bench.prompts import BenchPrompt, spread
from ..bench.setting import TARGET_ONLY, Setting, matched_settings
from ..bench.summary import BenchResult, summarise
from ..bench.tables import print_result
from ..cluster.config import EngineConfig
from ..core.errors import ConfigError
from .bench_prompts import bench_prompts
from .engine import AsyncEngine
from .ray_runtime import quiet_libraries
from .settings import build_serve_args


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """What is asked of `draftline bench`.

    prompts     a file; None: the bundled ones
    drafters    as `matched_settings` reads it
    base_url    of a server; None: an engine in this process
    one_engine  all settings share one engine, for models too large to be loaded several times
    output, plots  where JSON and PNG files go; None: nowhere
    """

    prompts: Path | None
    num_prompts: int
    drafters: str | None
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool
    rounds: int
    load: Load
    base_url: str | None = None
    model: str | None = None
    api_key: str | None = None
    one_engine: bool = False
    output: Path | None = None
    plots: Path | None = None

    def plan(self, prompts: Sequence[BenchPrompt]) -> Plan:
        """The matched runs over `prompts`."""
        return Plan(
            prompts=prompts,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            rounds=self.rounds,
            load=self.load,
        )


@dataclass(frozen=True, slots=True)
class _Bench:
    """Ready to measure.

    what      is measured, for JSON
    compares  whether seeds make answers comparable
    explain   judges answers that differ
    """

    endpoints: Mapping[Setting, Endpoint]
    plan: Plan
    what: dict[str, Any]
    compares: bool = True
    explain: Explain | None = None


def run_bench(job: BenchJob, settings: Mapping[str, Any], console: Console) -> int:
    """Measure, print, write; 1 where an answer differs from the target's own, else 0.

    Raises `DraftlineError`.
    """
    quiet_libraries()
    if job.plots is not None:
        require_matplotlib()
    result = asyncio.run(_measure(job, settings, console))
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


async def _measure(job: BenchJob, settings: Mapping[str, Any], console: Console) -> BenchResult:
    prompts = spread(bench_prompts(job.prompts), job.num_prompts)
    opened = _engines(job, settings, prompts) if job.base_url is None else _server(job, prompts)
    tell = console.print if console.is_terminal else lambda _text: None
    async with opened as bench:
        console.print(_headline(bench, len(prompts)))
        runs = await run_matched(bench.endpoints, bench.plan, tell)
    what = {"machine": machine().fields(), "of": bench.what, "load": _load_fields(job)}
    found = tuple(differences(runs, TARGET_ONLY, bench.explain)) if bench.compares else None
    return BenchResult(what, summarise(runs, TARGET_ONLY), found)


@asynccontextmanager
async def _server(job: BenchJob, prompts: Sequence[BenchPrompt]) -> AsyncIterator[_Bench]:
    assert job.base_url is not None
    async with HttpEndpoint(job.base_url, job.api_key) as endpoint:
        info = (await endpoint.connect(job.model)).info
        if not info.is_draftline and job.drafters is not None:
            raise ConfigError("drafters", f"{job.base_url} is no draftline server; leave it out")
        what = {"base_url": job.base_url, "model": info.model, "is_draftline": info.is_draftline}
        found = matched_settings(info.drafters, job.drafters)
        yield _Bench(dict.fromkeys(found, endpoint), job.plan(prompts), what, info.is_draftline)


@asynccontextmanager
async def _engines(
    job: BenchJob, settings: Mapping[str, Any], prompts: Sequence[BenchPrompt]
) -> AsyncIterator[_Bench]:
    config = build_serve_args(settings).engine
    found = matched_settings([drafter.source for drafter in config.drafters], job.drafters)
    configs = [config if job.one_engine else _with_drafters(config, one) for one in found]
    async with AsyncExitStack() as stack:
        engines: dict[EngineConfig, AsyncEngine] = {}
        for one in configs:
            if one not in engines:
                engines[one] = AsyncEngine(one)
                await engines[one].start()
                stack.push_async_callback(engines[one].close)
        tokenizer = engines[configs[0]].tokenizer
        room = engines[configs[0]].max_model_len - job.max_tokens
        plan = job.plan(_that_fit(prompts, tokenizer, room))
        endpoints = {
            setting: EngineEndpoint(engines[one], per_request=job.one_engine)
            for setting, one in zip(found, configs, strict=True)
        }
        what = {"engine": config.model_dump(mode="json"), "one_engine": job.one_engine}
        explain = explain_by_model(config.model, plan, tokenizer)
        yield _Bench(endpoints, plan, what, explain=explain)


def _with_drafters(config: EngineConfig, setting: Setting) -> EngineConfig:
    """The engine with this setting's drafters only, so that no other one takes its time.

    Those that it would start processes for run in this one: several engines would start too many.
    """
    chosen = [
        one.model_copy(update={"transport": "inproc"}) if one.is_spawned else one
        for one in config.drafters
        if one.source in (setting.drafters or ())
    ]
    return config.model_copy(update={"drafters": tuple(chosen)})


def _that_fit(
    prompts: Sequence[BenchPrompt], tokenizer: PreTrainedTokenizerBase, room: int
) -> list[BenchPrompt]:
    fit = [one for one in prompts if len(tokenizer(one.text)["input_ids"]) <= room]
    if not fit:
        raise ConfigError(
            "prompts", f"none fits the {room} tokens that the context leaves; lower --max-tokens"
        )
    return fit


def _headline(bench: _Bench, num_prompts: int) -> str:
    plan, load = bench.plan, bench.plan.load
    if load.request_rate is None:
        how = f"{load.concurrency} at once"
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
        "num_prompts": job.num_prompts,
        "max_tokens": job.max_tokens,
        "temperature": job.temperature,
        "seed": job.seed,
        "ignore_eos": job.ignore_eos,
        "rounds": job.rounds,
        "concurrency": job.load.concurrency,
        "request_rate": job.load.request_rate,
    }
