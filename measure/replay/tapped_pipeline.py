"""A pipeline that keeps what the target said to drafters that ask about rows off the text."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from ...cluster.transport.stage_spec import Pipeline
from ...core.steps import StepInput, StepOutput
from .recording import Said, probed_contexts


class TappedPipeline:
    """`pipeline`, and beside it `said`: the target's most probable tokens after each row.

    It listens while `said` is not None.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.said: Said | None = None
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
    def num_blocks(self) -> int:
        """KV blocks of the pipeline."""
        return self._pipeline.num_blocks

    async def start(self) -> None:
        """Start the pipeline."""
        await self._pipeline.start()

    def submit(self, step: StepInput) -> Awaitable[StepOutput]:
        """Send a step, and listen to its answer."""
        answer = self._pipeline.submit(step)
        if self.said is None or not len(step.probe_rows):
            return answer
        return self._heard(step, answer, self.said)

    async def close(self) -> None:
        """Close the pipeline."""
        await self._pipeline.close()

    @staticmethod
    async def _heard(step: StepInput, answer: Awaitable[StepOutput], said: Said) -> StepOutput:
        output = await asyncio.ensure_future(answer)
        for context, ids in zip(probed_contexts(step), output.probe_ids.tolist(), strict=True):
            # Some ask for more than others.
            if len(ids) > len(said.get(context, ())):
                said[context] = tuple(ids)
        return output
