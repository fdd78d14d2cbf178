"""A pipeline whose steps take as long as those of a profile, and say what the real ones said."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace

import numpy as np

from ...cluster.pipeline.local_pipeline import LocalPipeline
from ...cluster.transport.stage_spec import StageSpec
from ...core.arrays import Span
from ...core.steps import StepInput, StepOutput
from ..replay.tapped_pipeline import PassingPipeline
from .cost_profile import CostProfile
from .draft_times import draft_seconds, head_kind


class SlowedPipeline(PassingPipeline):
    """Real stages in this process, whose answers come when the profile's stages would give them.

    num_steps  that were answered
    num_late   of these, whose real work took longer than the profile's
    """

    def __init__(self, specs: Sequence[StageSpec], profile: CostProfile) -> None:
        stages = profile.num_stages
        self._max_in_flight = stages + (stages > 1)
        super().__init__(LocalPipeline([spec.build() for spec in specs], self._max_in_flight))
        self._profile = profile
        heads = specs[-1].heads if specs else ()
        self._kinds = {head.name: head_kind(head.folder) for head in heads}
        self._free_at = [0.0] * stages
        self.num_steps = self.num_late = 0

    @property
    def num_stages(self) -> int:
        """Stages of the profile."""
        return self._profile.num_stages

    @property
    def max_in_flight(self) -> int:
        """As many as so many stages take."""
        return self._max_in_flight

    def submit(self, step: StepInput) -> Awaitable[StepOutput]:
        """Send a step; the awaitable is its result, not before the profile's last stage."""
        loop = asyncio.get_running_loop()
        num_read = int(step.context_lens.sum())
        num_seen = int((np.diff(step.request_starts) * step.context_lens).sum())
        seconds = self._profile.slowdown * self._profile.stage_s(
            len(step.token_ids), num_read, num_seen
        )
        arrived = loop.time()
        ends: list[float] = []
        for stage, free_at in enumerate(self._free_at[:-1]):
            arrived = max(arrived, free_at) + seconds
            self._free_at[stage] = arrived
            ends.append(arrived)
        return asyncio.ensure_future(self._answered(super().submit(step), ends, arrived, seconds))

    async def _answered(
        self, result: Awaitable[StepOutput], ends: list[float], arrived: float, seconds: float
    ) -> StepOutput:
        output = self._timed(await result)
        # Answers come in the order of their steps.
        ahead = sum(drafts.seconds for drafts in output.head_drafts)
        ready = self._free_at[-1] = max(arrived, self._free_at[-1]) + seconds + ahead
        left = ready - asyncio.get_running_loop().time()
        self.num_steps += 1
        self.num_late += left < 0
        if left > 0:
            await asyncio.sleep(left)
        if not output.stage_spans:
            return output
        began = [end - seconds for end in ends]
        return _traced(output, [*zip(began, ends, strict=True), (ready - seconds - ahead, ready)])

    def _timed(self, output: StepOutput) -> StepOutput:
        """With the profile's seconds for what heads drafted."""
        if not output.head_drafts:
            return output
        drafts = [
            one._replace(
                seconds=draft_seconds(
                    self._profile, self._kinds[one.source], one.proposals, one.seconds
                )
            )
            for one in output.head_drafts
        ]
        return replace(output, head_drafts=tuple(drafts))


def _traced(output: StepOutput, spans: Sequence[Span]) -> StepOutput:
    """With when the profile's stages worked, told by the loop's clock."""
    offset = time.time() - asyncio.get_running_loop().time()
    return replace(
        output, stage_spans=tuple((begin + offset, end + offset) for begin, end in spans)
    )
