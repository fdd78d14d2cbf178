"""The parts of a simulated engine over a cost profile, and its clock.

Its pipeline has the real results and the step times of the profile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ...cluster.config import DrafterConfig, EngineConfig
from ...cluster.drafting.hub import AnyDrafter
from ...cluster.drafting.local_drafter import LocalDrafter
from ...cluster.engine.assembly import MakePipeline
from ...cluster.engine.engine_thread import EngineTime
from ...cluster.transport.stage_spec import Pipeline, StageSpec, run_stage
from ...core.arrays import Span
from ...core.errors import ConfigError, StageError, StageLost
from ...core.interfaces import AheadDrafter, StageMemory
from ...core.steps import StepInput, StepOutput
from .cost_profile import SMALL_MODEL, CostProfile
from .host_clock import HostClock, HostLoop
from .slowed_drafter import DraftTimes, slowed, times_of

if TYPE_CHECKING:
    import torch


class SlowedPipeline:
    """Real stages, which compute a step while the clock is paused. The result comes when the
    profile's stages would return it.
    """

    # Multi-step decoding is off, so that every step is timed.
    decodes_several = False

    def __init__(self, specs: Sequence[StageSpec], profile: CostProfile, clock: HostClock) -> None:
        self._stages = tuple(spec.build() for spec in specs)
        self._profile = profile
        self._clock = clock
        heads = specs[-1].heads if specs else ()
        self._times = {head.name: DraftTimes(profile, head.kind) for head in heads}
        self._free_at = [0.0] * profile.num_stages

    @property
    def num_stages(self) -> int:
        """Stages of the profile."""
        return self._profile.num_stages

    @property
    def max_in_flight(self) -> int:
        """The number of steps in flight for the profile's stages."""
        return self.num_stages + (self.num_stages > 1)

    @property
    def num_blocks(self) -> int:
        """See `Pipeline`."""
        return min(stage.num_blocks for stage in self._stages)

    @property
    def memory(self) -> Sequence[StageMemory]:
        """See `Pipeline`."""
        return tuple(stage.memory for stage in self._stages)

    async def start(self) -> None:
        """See `Pipeline`; the stages are built already."""

    async def restart(self) -> tuple[int, ...]:
        """See `Pipeline`; the stages stay."""
        for stage in self._stages:
            stage.reset()
        return ()

    async def close(self) -> None:
        """See `Pipeline`."""
        self._stages = ()

    def submit(self, step: StepInput) -> asyncio.Future[StepOutput]:
        """Send a step; the future completes when the profile's last stage would."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[StepOutput] = loop.create_future()
        try:
            with self._clock.stopped():
                output = self._timed(self._run(step))
        except (StageError, StageLost) as error:
            answer.set_exception(error)
            return answer
        spans = self._spans(step, sum(drafts.seconds for drafts in output.head_drafts))
        if step.is_traced:
            output = replace(output, stage_spans=spans)
        answer_at(spans[-1][1], answer, output)
        return answer

    def _run(self, step: StepInput) -> StepOutput:
        result: torch.Tensor | StepOutput | None = None
        for index, stage in enumerate(self._stages):
            assert not isinstance(result, StepOutput)
            result = run_stage(index, stage, step, result)
        assert isinstance(result, StepOutput), "the last stage answers"
        return result

    def _spans(self, step: StepInput, ahead_s: float) -> tuple[Span, ...]:
        """The intervals in which the profile's stages run a step; `ahead_s` is the time of its
        heads' drafts."""
        num_read = int(step.context_lens.sum())
        num_seen = int((np.diff(step.request_starts) * step.context_lens).sum())
        seconds = self._profile.stage_s(len(step.token_ids), num_read, num_seen)
        arrives = self._clock()
        spans: list[Span] = []
        for stage, free_at in enumerate(self._free_at):
            begin = max(arrives, free_at)
            arrives = begin + seconds
            if stage == self.num_stages - 1:
                arrives += ahead_s
            self._free_at[stage] = arrives
            spans.append((begin, arrives))
        return tuple(spans)

    def _timed(self, output: StepOutput) -> StepOutput:
        """The result with the profile's seconds for the drafts of heads in the profile."""
        drafts = [
            one._replace(seconds=times.seconds(one.proposals, one.num_levels or None))
            if (times := self._times[one.source]).are_known
            else one
            for one in output.head_drafts
        ]
        return replace(output, head_drafts=tuple(drafts)) if drafts else output


def answer_at(seconds: float, answer: asyncio.Future[StepOutput], output: StepOutput) -> None:
    """Complete the future at this time of the loop, unless it was cancelled."""

    def give() -> None:
        if not answer.done():
            answer.set_result(output)

    asyncio.get_running_loop().call_at(seconds, give)


class Simulation:
    """Makes the pipeline and the drafters of one engine, with the times of a profile.

    small_model    the profile's entry whose times small models use
    host_slowdown  processor seconds of the engine's own work here for each second there
    """

    def __init__(
        self, profile: CostProfile, small_model: str = SMALL_MODEL, host_slowdown: float = 1.0
    ) -> None:
        """Raises `ConfigError` if the profile has no such entry."""
        if small_model not in {SMALL_MODEL, *profile.drafters}:
            known = ", ".join(name for name in profile.drafters if name.startswith(SMALL_MODEL))
            raise ConfigError("small-model", f"{profile.name} has no {small_model!r}; has: {known}")
        self.profile = profile
        self._small_model = small_model
        self.clock = HostClock(host_slowdown)
        self.time = EngineTime(self.clock, self.clock, partial(HostLoop, self.clock))

    def config(self, config: EngineConfig) -> EngineConfig:
        """The engine's settings, with the profile's stages; the real stage runs in this process."""
        return config.model_copy(update={"backend": "local", "pipeline_parallel_size": 1})

    def pipelines(self, _make_pipeline: MakePipeline) -> MakePipeline:
        """For `Replica`."""

        def make(specs: Sequence[StageSpec]) -> Pipeline:
            return SlowedPipeline(specs, self.profile, self.clock)

        return make

    def drafters(
        self, configs: Sequence[DrafterConfig], drafters: Sequence[AnyDrafter]
    ) -> list[AnyDrafter]:
        """The drafters of these settings, which take the profile's times.

        Raises `CheckpointError` or `ConfigError` for a head that cannot be read.
        """
        found: list[AnyDrafter] = []
        for config, local in zip(configs, drafters, strict=True):
            assert isinstance(local, LocalDrafter), "a simulation has its drafters in process"
            if isinstance(local.drafter, AheadDrafter):
                # A head of the last stage, which takes its time in the step.
                found.append(local)
                continue
            times = times_of(config, self.profile, self._small_model)
            found.append(replace(local, drafter=slowed(local.drafter, times, self.clock)))
        return found
