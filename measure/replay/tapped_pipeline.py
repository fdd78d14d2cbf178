"""Pipeline wrappers that delegate every call and observe `submit`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from ...cluster.transport.stage_spec import Pipeline
from ...core.steps import StepInput, StepOutput
from .recording import Said, probed_contexts


class PassingPipeline:
    """Delegates each call to `pipeline`; the base of wrappers that observe `submit`."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self._pipeline.num_stages

    @property
    def max_in_flight(self) -> int:
        """Most steps in flight of the pipeline."""
        return self._pipeline.max_in_flight

    @property
    def decodes_several(self) -> bool:
        """False, so that every step is observed."""
        return False

    @property
    def num_blocks(self) -> int:
        """KV blocks of the pipeline."""
        return self._pipeline.num_blocks

    async def start(self) -> None:
        """Start the pipeline."""
        await self._pipeline.start()

    def submit(self, step: StepInput) -> Awaitable[StepOutput]:
        """Send a step; the awaitable is its result."""
        return self._pipeline.submit(step)

    async def restart(self) -> tuple[int, ...]:
        """Restart the pipeline."""
        return await self._pipeline.restart()

    async def close(self) -> None:
        """Close the pipeline."""
        await self._pipeline.close()


class TappedPipeline(PassingPipeline):
    """Collects in `said` the target's most probable tokens after each row that drafters probe.

    It collects while `said` is not None.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self.said: Said | None = None

    def submit(self, step: StepInput) -> Awaitable[StepOutput]:
        """Send a step, and observe its result."""
        result = super().submit(step)
        if self.said is None or not len(step.probes.rows):
            return result
        return self._heard(step, result, self.said)

    @staticmethod
    async def _heard(step: StepInput, result: Awaitable[StepOutput], said: Said) -> StepOutput:
        output = await asyncio.ensure_future(result)
        assert output.probe_ids is not None
        for context, ids in zip(probed_contexts(step), output.probe_ids.tolist(), strict=True):
            # Rows may request different numbers of tokens.
            if len(ids) > len(said.get(context, ())):
                said[context] = tuple(ids)
        return output
