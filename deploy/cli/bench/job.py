"""Arguments of `draftline bench` and `draftline lossless`; fields with a description are flags."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ....core.errors import ConfigError
from ....measure.clients.endpoint import Load, Setting
from ....measure.prompts import BenchPrompt
from ....measure.replay.recording import Recording
from ....measure.runs.matched import Plan
from ....models.load.checkpoint import answers_chats
from ...settings.settings import KEY_VARIABLE
from ..flags import FlagGroup

ApiKey = Annotated[str | None, Field(description="bearer token for the server")]
Dataset = Literal[
    "sharegpt", "messages", "mt-bench", "spec-bench", "mbpp", "gsm8k", "cnn-dm", "humaneval"
]
Drafters = Annotated[
    str | None,
    Field(
        description="settings parted by commas: a drafter, several joined by +, or all; "
        "default: each drafter alone, then all"
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """Arguments of `draftline bench`.

    `model` is the server's name for it; `rows` are a suite's settings, in place of `drafters`.
    """

    prompts: Annotated[
        Path | None,
        Field(
            description="file of a dataset in its published form (JSON lines, a JSON list or CSV): "
            "Spec-Bench, MT-Bench, HumanEval, GSM8K, MBPP, CNN/DM or ShareGPT; or lines with name "
            "and prompt; default: the bundled held-out prompts"
        ),
    ] = None
    dataset: Annotated[
        Dataset | None,
        Field(description="form of --prompts; default: as the keys of its rows tell"),
    ] = None
    num_prompts: Annotated[
        int, Field(ge=1, description="prompts of a round, spread evenly over the file")
    ] = 16
    turns: Annotated[
        int,
        Field(
            ge=1,
            description="turns of a conversation that are asked, one after the other; the answers "
            "stay in it",
        ),
    ] = 1
    chat: Annotated[
        bool,
        Field(
            description="prompts are said by a user, through the model's chat template; where it "
            "has one, this is the default, with two turns and answers that end where they end"
        ),
    ] = False
    dataset_lengths: Annotated[
        bool,
        Field(description="answers are as long as the dataset's own, --max-tokens at most"),
    ] = False
    dataset_times: Annotated[
        bool, Field(description="requests come at the times in the dataset")
    ] = False
    max_tokens: Annotated[int, Field(ge=1, description="tokens of each answer")] = 128
    temperature: Annotated[float, Field(ge=0, description="of the sampling; 0: greedy")] = 0.0
    seed: Annotated[int, Field(ge=0, description="of the sampling and of the arrival times")] = 0
    ignore_eos: Annotated[
        bool, Field(description="answers go on to --max-tokens after an end token")
    ] = True
    concurrency: Annotated[
        int | None, Field(ge=1, description="most requests at once; default: 1; no limit at a rate")
    ] = None
    request_rate: Annotated[
        float | None, Field(gt=0, description="mean requests a second, at Poisson times")
    ] = None
    rounds: Annotated[int, Field(ge=1, description="times that every setting runs")] = 3
    warm_up: Annotated[
        bool, Field(description="every setting runs once before, which is not kept")
    ] = True
    drafters: Drafters = None
    suite: Annotated[
        Literal["spectra", "heads", "model-drafters"] | None,
        Field(
            description="the rows of SPECTRA's tables and their recent peers; trained heads "
            "beside what needs no training; or small models of several tokenizers, together and "
            "under each rule of acceptance. Trees of 60 nodes (models: 32) unless --config says "
            "otherwise"
        ),
    ] = None
    suite_rows: Annotated[
        str | None,
        Field(
            description="of a suite: the rows to run, by their names parted by semicolons, * for "
            "any part of one (default: all); fewer engines are in memory then"
        ),
    ] = None
    heads: Annotated[
        str | None,
        Field(
            description="of the suite of heads: further ones, NAME=FOLDER parted by commas, in "
            "the order of the table; the bundled model's own follow"
        ),
    ] = None
    profile: Annotated[
        Literal["paper", "draftline"] | None,
        Field(
            description="of the suite of spectra: rows as the paper has them, or with our own "
            "defaults (default: both)"
        ),
    ] = None
    store: Annotated[
        str | None, Field(description="of the suite: a store of the documents of lowest perplexity")
    ] = None
    unrefined_store: Annotated[
        str | None,
        Field(description="of the suite: a store of as many documents of any perplexity"),
    ] = None
    one_engine: Annotated[
        bool,
        Field(
            description="all settings share one engine, with drafters where the settings put them: "
            "for models too large to load once for each. Drafters that a setting leaves out then "
            "take time still, as on a server"
        ),
    ] = False
    record: Annotated[
        Path | None,
        Field(description="also keep the target's own answers in this file, for --replay"),
    ] = None
    replay: Annotated[
        Path | None,
        Field(
            description="take prompts and answers from this file and run no target: tau of any "
            "drafters in a fraction of the time. Times are then those of the engine without a "
            "target"
        ),
    ] = None
    cost_profile: Annotated[
        str | None,
        Field(
            description="simulated speed: real drafts and answers, at the times of another model "
            "on other machines: 8b-h100, 70b-2-h200, 70b-4-h200, 70b-8-h200, or a file"
        ),
    ] = None
    small_model: Annotated[
        str | None,
        Field(
            description="of a cost profile: its entry whose times small models take, "
            "such as model-0.5b of 8b-h100; default: model"
        ),
    ] = None
    host_slowdown: Annotated[
        float | None,
        Field(
            gt=0,
            description="of a cost profile: processor seconds of the engine's own work, and of "
            "drafters that the profile does not name, here for each second there; default: 1",
        ),
    ] = None
    base_url: Annotated[
        str | None,
        Field(description="measure this OpenAI-compatible server, and no engine in this process"),
    ] = None
    api_key: ApiKey = None
    output: Annotated[Path | None, Field(description="JSON file of all figures")] = None
    plots: Annotated[Path | None, Field(description="folder for PNG plots")] = None
    model: str | None = None
    rows: tuple[Setting, ...] | None = None

    def for_target(self, target: str, given: Collection[str]) -> BenchJob:
        """The job with the defaults for chats, if the target answers them; `given` flags stay."""
        if not {"chat", "record", "replay", "base_url"}.isdisjoint(given):
            return self
        if not answers_chats(target):
            return self
        chats = {"chat": True, "turns": 2, "ignore_eos": False}
        return replace(self, **{name: one for name, one in chats.items() if name not in given})

    @property
    def asks_plainly(self) -> bool:
        """Whether every prompt is one text with one answer, and without a time."""
        is_timed = self.dataset_times or self.dataset_lengths
        return self.turns == 1 and not self.chat and not is_timed

    @property
    def profiles(self) -> tuple[str, ...]:
        """The profiles of the suite's rows."""
        return (self.profile,) if self.profile else ("paper", "draftline")

    @property
    def load(self) -> Load:
        """How requests come: one at a time unless a concurrency, a rate or times are asked for."""
        is_timed = self.dataset_times or self.request_rate is not None
        is_default = self.concurrency is None and not is_timed
        concurrency = 1 if is_default else self.concurrency
        return Load(concurrency=concurrency, request_rate=self.request_rate, seed=self.seed)

    def plan(self, prompts: Sequence[BenchPrompt]) -> Plan:
        """The matched runs over `prompts`. Raises `ConfigError` where these lack times."""
        load = self.load
        if self.dataset_times:
            times = [prompt.arrives_s for prompt in prompts]
            if None in times:
                raise ConfigError("dataset-times", "the prompts tell no times (timestamp)")
            load = replace(load, arrivals=tuple(time or 0.0 for time in times))
        return Plan(
            prompts=prompts,
            turns=self.turns,
            is_chat=self.chat,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            rounds=self.rounds,
            warm_up=self.warm_up,
            load=load,
        )

    def as_recorded(self, recording: Recording) -> BenchJob:
        """The job with the parameters of a recording."""
        return replace(
            self,
            num_prompts=len(recording.answers),
            max_tokens=recording.max_tokens,
            temperature=recording.temperature,
            seed=recording.answers[0].seed,
            ignore_eos=recording.ignore_eos,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessJob:
    """Arguments of `draftline lossless`. `model` is the server's name for it."""

    model: str | None = None
    base_url: Annotated[
        str | None,
        Field(description="a running draftline server; default: an engine in this process"),
    ] = None
    api_key: ApiKey = None
    drafters: Drafters = None
    prompts: Annotated[
        Path | None,
        Field(description="JSON lines, as for bench; default: the bundled held-out prompts"),
    ] = None
    num_prompts: Annotated[int, Field(ge=1, description="prompts of every check")] = 8
    max_tokens: Annotated[int, Field(ge=2, description="tokens of each answer")] = 64
    concurrency: Annotated[int, Field(ge=2, description="requests at once, beside alone")] = 8
    seeds: Annotated[int, Field(ge=1, description="draws of the distribution check")] = 200
    output: Annotated[Path | None, Field(description="JSON file of the report")] = None
    shadow: Annotated[
        bool,
        Field(
            description="ask for nothing: show what became of the requests that the server "
            "repeated itself (its shadow_rate)"
        ),
    ] = False


BENCH = FlagGroup(title="Measurement", kind=BenchJob, variables={"api_key": KEY_VARIABLE})
LOSSLESS = FlagGroup(title="Checks", kind=LosslessJob, variables={"api_key": KEY_VARIABLE})
