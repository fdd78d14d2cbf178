"""A pipeline whose stages all run in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...core.errors import DeviceLost, StageError, StageLost
from ...core.steps import StepInput, StepOutput
from ..transport.stage_spans import Spans, run_traced
from ..transport.stage_spec import StageRunner, run_stage

if TYPE_CHECKING:
    import torch


class LocalPipeline:
    """Runs each step inside `submit`, which blocks the event loop for that long.

    No queue, thread or copy stands between the caller and the stages: the lowest latency there is.
    The answer is complete when `submit` returns, so `max_in_flight` bounds nothing here; it tells
    the caller how many steps to plan ahead, as with any pipeline.

    After a `DeviceLost` every step gets that error: the process must be replaced.
    """

    def __init__(self, stages: Sequence[StageRunner], max_in_flight: int = 1) -> None:
        assert stages, "a pipeline has at least one stage"
        self._stages = tuple(stages)
        self._max_in_flight = max_in_flight
        self._open = False
        self._device_lost: DeviceLost | None = None

    @property
    def num_stages(self) -> int:
        """See `Pipeline`."""
        return len(self._stages)

    @property
    def max_in_flight(self) -> int:
        """See `Pipeline`."""
        return self._max_in_flight

    @property
    def num_blocks(self) -> int:
        """See `Pipeline`."""
        return min(stage.num_blocks for stage in self._stages)

    async def start(self) -> None:
        """See `Pipeline`; the stages are built already."""
        self._open = True

    def submit(self, step: StepInput) -> asyncio.Future[StepOutput]:
        """Run the step now; the future is done."""
        future: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        if self._device_lost is not None or not self._open:
            future.set_exception(self._device_lost or StageLost("the pipeline is not open"))
            return future
        try:
            future.set_result(self._run(step))
        except StageError as error:
            future.set_exception(error)
        except DeviceLost as error:
            # The stages are of no use to this process, however often the pipeline is opened.
            self._device_lost = error
            future.set_exception(error)
        return future

    async def close(self) -> None:
        """See `Pipeline`."""
        self._open = False

    def _run(self, step: StepInput) -> StepOutput:
        hidden: torch.Tensor | None = None
        spans: Spans = ()
        for index, stage in enumerate(self._stages):
            if step.is_traced:
                result, spans = run_traced(index, stage, step, hidden, spans)
            else:
                result = run_stage(index, stage, step, hidden)
            if isinstance(result, StepOutput):
                return result
            hidden = result
        raise StageError(f"stage {len(self._stages) - 1} gave hidden states in place of an answer")
