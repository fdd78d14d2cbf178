"""Opens what `draftline bench` measures, engines in this process or a server, and reads prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ....cluster.config import EngineConfig
from ....cluster.engine.assembly import MakePipeline
from ....cluster.transport.stage_spec import Pipeline, StageSpec
from ....core.errors import ConfigError
from ....core.request.sampling_params import RequestOptions
from ....core.verify.rules import COUPLED
from ....measure.clients.endpoint import Endpoint, Load, Setting, matched_settings, run_load
from ....measure.clients.engine_endpoint import EngineEndpoint, SimulatedEndpoint, collector_spared
from ....measure.clients.http_endpoint import HttpEndpoint
from ....measure.prompts import BenchPrompt, read_prompts
from ....measure.replay.recording import ProbedTokens, RecordedAnswer, Recording, recorded_params
from ....measure.replay.replay_pipeline import ReplayPipeline, TappedPipeline
from ....measure.runs.matched import Explain, Plan
from ....measure.runs.near_tie import explain_by_model
from ....measure.simulate.cost_profile import SMALL_MODEL, CostProfile, read_cost_profile
from ....measure.simulate.host_clock import HostClock
from ....measure.simulate.simulation import Simulation
from ....retrieval_store.serving.open_store import shown_store
from ...engine.async_engine import AsyncEngine
from ...settings.settings import build_serve_args
from ..demo.prompts import held_out_prompts
from ..progress import progress
from .job import BenchJob

# Tokens that a chat template puts around a turn and its answer, at most.
CHAT_FRAME = 64


@dataclass(frozen=True, slots=True)
class BenchTargets:
    """The opened endpoints of a benchmark.

    what      describes them in JSON
    compares  whether answers to one seed must be equal
    explain   judges differing answers
    profile   of simulated times
    engines   of settings with an engine of their own
    """

    endpoints: Mapping[Setting, Endpoint]
    plan: Plan
    what: dict[str, Any]
    compares: bool = True
    explain: Explain | None = None
    profile: CostProfile | None = None
    engines: Mapping[Setting, AsyncEngine] = field(default_factory=dict)

    def draft_ms(self) -> dict[str, dict[str, float]]:
        """Milliseconds of a draft up to now, by setting and drafter, where it has an engine."""
        return {
            setting.name: {
                stats.name: 1e3 * stats.propose_s / stats.latency_count
                for stats in engine.stats().drafters
                if stats.latency_count
            }
            for setting, engine in self.engines.items()
        }


@asynccontextmanager
async def open_server(job: BenchJob, prompts: Sequence[BenchPrompt]) -> AsyncIterator[BenchTargets]:
    """The server at the job's `base_url` for every setting."""
    assert job.base_url is not None
    for name in ("record", "replay", "cost_profile"):
        if getattr(job, name) is not None:
            raise ConfigError(
                name.replace("_", "-"), "needs an engine in this process: leave out --base-url"
            )
    if job.dataset_lengths:
        raise ConfigError("dataset-lengths", "needs the model's tokenizer: leave out --base-url")
    async with HttpEndpoint(job.base_url, job.api_key) as endpoint:
        info = (await endpoint.connect(job.model)).info
        if not info.is_draftline and job.drafters is not None:
            raise ConfigError("drafters", f"{job.base_url} is no draftline server; leave it out")
        what = {"base_url": job.base_url, "model": info.model, "is_draftline": info.is_draftline}
        settings = matched_settings(info.drafters, job.drafters)
        yield BenchTargets(
            dict.fromkeys(settings, endpoint), job.plan(prompts), what, info.is_draftline
        )


@asynccontextmanager
async def open_engines(
    job: BenchJob,
    settings: Mapping[str, Any],
    prompts: Sequence[BenchPrompt],
    recording: Recording | None = None,
) -> AsyncIterator[BenchTargets]:
    """An engine for each setting, or one for all; with a `recording`, none loads the target."""
    config = build_serve_args(settings).engine
    rows = job.rows or matched_settings(
        [drafter.source for drafter in config.drafters], job.drafters
    )
    configs = [config if job.one_engine else _with_drafters(config, row) for row in rows]
    taps: list[TappedPipeline] = []
    if recording is not None:
        _check_fits(config, recording)
    pipelines = _tapped(taps) if recording is None else _replaying(recording)
    profile = None if job.cost_profile is None else _profile(job, recording, config.quantization)
    async with AsyncExitStack() as stack:
        engines: dict[EngineConfig, AsyncEngine] = {}
        clocks: dict[EngineConfig, HostClock] = {}
        distinct = list(dict.fromkeys(configs))
        with progress("starting", total=len(distinct), unit="engines") as work:
            for needed in distinct:
                if profile is None:
                    engines[needed] = AsyncEngine(needed, pipelines=pipelines)
                else:
                    simulation = _simulation(job, profile)
                    engines[needed] = _simulated(needed, simulation)
                    clocks[needed] = simulation.clock
                await engines[needed].start()
                stack.push_async_callback(engines[needed].close)
                work.advance()
        stack.enter_context(collector_spared())
        first = engines[configs[0]]
        turns, frame = job.turns, CHAT_FRAME if job.chat else 0
        prompts = that_fit(prompts, first, job.max_tokens, turns=turns, frame=frame)
        plan = job.plan(_with_lengths(prompts, first.tokenizer) if job.dataset_lengths else prompts)
        endpoints = {
            setting: _endpoint(engines[needed], clocks.get(needed), job, first.tokenizer)
            for setting, needed in zip(rows, configs, strict=True)
        }
        what = {
            "engine": _shown(config),
            "one_engine": job.one_engine,
            "replays": recording is not None,
        }
        explain = explain_by_model(config.model, plan.temperature, first.tokenizer)
        # Under other rules answers have the target's distribution, but are not its own for a seed.
        compares = config.acceptance == COUPLED or not job.temperature
        by_row = {row: engines[needed] for row, needed in zip(rows, configs, strict=True)}
        own = {} if job.one_engine else by_row
        yield BenchTargets(endpoints, plan, what, compares, explain, profile, own)
        # After the runs, so that what engines learn from it does not change the runs.
        if job.record is not None:
            target_answers = await _record(config.model, first, plan)
            target_answers.with_probed(await _ask_all(endpoints, plan, taps)).write(job.record)


def _endpoint(
    engine: AsyncEngine,
    clock: HostClock | None,
    job: BenchJob,
    tokenizer: PreTrainedTokenizerBase,
) -> Endpoint:
    if clock is None:
        return EngineEndpoint(engine, per_request=job.one_engine, tokenizer=tokenizer)
    return SimulatedEndpoint(engine, clock, per_request=job.one_engine, tokenizer=tokenizer)


def _simulated(config: EngineConfig, simulation: Simulation) -> AsyncEngine:
    return AsyncEngine(
        simulation.config(config),
        pipelines=simulation.pipelines,
        drafters=partial(simulation.drafters, config.drafters),
        engine_time=simulation.time,
    )


def _simulation(job: BenchJob, profile: CostProfile) -> Simulation:
    return Simulation(profile, job.small_model or SMALL_MODEL, job.host_slowdown or 1.0)


def _profile(job: BenchJob, recording: Recording | None, quantization: str) -> CostProfile:
    assert job.cost_profile is not None
    if recording is not None or job.record is not None or job.one_engine:
        raise ConfigError(
            "cost-profile", "needs engines of its own: leave out --record, --replay, --one-engine"
        )
    if job.request_rate is not None or job.dataset_times:
        raise ConfigError(
            "cost-profile",
            "skips idle time, so requests cannot come at times of their own: "
            "leave out --request-rate, --dataset-times; --concurrency says how many come at once",
        )
    return read_cost_profile(job.cost_profile).rounded(quantization)


def _check_fits(config: EngineConfig, recording: Recording) -> None:
    if config.acceptance != COUPLED:
        raise ConfigError("replay", "repeats the target's own tokens: it needs acceptance: coupled")
    if config.model != recording.model:
        raise ConfigError(
            "replay", f"is of model {recording.model}, not of {config.model}: its tokens differ"
        )


async def _record(model: str, engine: AsyncEngine, plan: Plan) -> Recording:
    """Record the target's own answers, one prompt after the other."""
    answers = []
    with progress("recording", total=len(plan.prompts), unit="prompts") as work:
        for index, prompt in enumerate(plan.prompts):
            params = recorded_params(plan, index)
            assert params.seed is not None
            output = await engine.generate(prompt.text, params, RequestOptions(speculative=False))
            answers.append(RecordedAnswer.of(prompt.name, prompt.text, params.seed, output))
            work.advance()
    return Recording(
        model=model,
        max_tokens=plan.max_tokens,
        temperature=plan.temperature,
        ignore_eos=plan.ignore_eos,
        answers=tuple(answers),
    )


def _shown(config: EngineConfig) -> dict[str, Any]:
    """The settings for a report, without secrets."""
    fields = config.model_dump(mode="json")
    for drafter in fields["drafters"]:
        if drafter.get("store") is not None:
            drafter["store"] = shown_store(drafter["store"])
    return fields


async def _ask_all(
    endpoints: Mapping[Setting, Endpoint], plan: Plan, taps: Sequence[TappedPipeline]
) -> ProbedTokens:
    """Run every setting once, and collect the target's predictions for drafters."""
    probed: ProbedTokens = {}
    for tap in taps:
        tap.probed = probed
    asked = [setting for setting in endpoints if setting.drafters]
    num_asks = len(asked) * len(plan.prompts)
    with progress("recording the target's predictions", total=num_asks, unit="prompts") as work:
        for setting in asked:
            asks = plan.asks(setting, f"record-{setting.name}")
            await run_load(endpoints[setting], asks, Load(), work)
    for tap in taps:
        tap.probed = None
    return probed


def _tapped(taps: list[TappedPipeline]) -> Callable[[MakePipeline], MakePipeline]:
    def pipelines(make_pipeline: MakePipeline) -> MakePipeline:
        def make(specs: Sequence[StageSpec]) -> Pipeline:
            taps.append(TappedPipeline(make_pipeline(specs)))
            return taps[-1]

        return make

    return pipelines


def _replaying(recording: Recording) -> Callable[[MakePipeline], MakePipeline]:
    return lambda _make_pipeline: lambda _specs: ReplayPipeline(recording.answers)


def _with_drafters(config: EngineConfig, setting: Setting) -> EngineConfig:
    """The engine's settings with this setting's drafters only, in its order.

    Drafters with processes of their own run in this one: several engines would start too many.
    """
    known = {drafter.source: drafter for drafter in config.drafters}
    chosen = [
        drafter.model_copy(update={"transport": "inproc"}) if drafter.is_spawned else drafter
        for drafter in map(known.__getitem__, setting.drafters or ())
    ]
    changes: dict[str, Any] = {"drafters": tuple(chosen)}
    if setting.is_ordered:
        changes |= {"node_budget": "ordered"}
    if setting.acceptance is not None:
        changes |= {"acceptance": setting.acceptance}
    return config.model_copy(update=changes)


def _with_lengths(
    prompts: Sequence[BenchPrompt], tokenizer: PreTrainedTokenizerBase
) -> list[BenchPrompt]:
    """Answers as long as those of the dataset. Raises `ConfigError` where one has none."""
    if not all(prompt.reference for prompt in prompts):
        raise ConfigError("dataset-lengths", "the prompts have no answers of their own")
    return [
        replace(prompt, answer_tokens=max(len(tokenizer(prompt.reference)["input_ids"]), 1))
        for prompt in prompts
    ]


def that_fit(
    prompts: Sequence[BenchPrompt],
    engine: AsyncEngine,
    max_tokens: int,
    *,
    turns: int = 1,
    frame: int = 0,
) -> list[BenchPrompt]:
    """Those whose first `turns`, each with `frame` tokens around it, and answers have room in the
    context. Raises `ConfigError` where none has.
    """

    def needed(prompt: BenchPrompt) -> int:
        asked = [prompt.text, *prompt.further_turns][:turns]
        sizes = (len(engine.tokenizer(turn)["input_ids"]) for turn in asked)
        return sum(size + frame + max_tokens for size in sizes)

    fit = [prompt for prompt in prompts if needed(prompt) <= engine.max_model_len]
    if not fit:
        raise ConfigError(
            "prompts",
            f"none fits the context of {engine.max_model_len} tokens with its answers; lower "
            "--max-tokens or --turns",
        )
    return fit


CHATS = Path(__file__).parents[2] / "assets" / "prompts" / "chats.jsonl"


def bench_prompts(
    path: Path | None, dataset: str | None = None, *, is_chat: bool = False
) -> list[BenchPrompt]:
    """The prompts of `path`, see `read_prompts`; None: the bundled ones, code to be continued or
    chats of two turns. Raises `ConfigError`."""
    if path is not None:
        return read_prompts(path, dataset)
    if dataset is not None:
        raise ConfigError("dataset", "needs the dataset's file: --prompts")
    if is_chat:
        return read_prompts(CHATS)
    return [BenchPrompt(prompt.name, prompt.text) for prompt in held_out_prompts()]
