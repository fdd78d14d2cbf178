"""A pipeline whose stages all run in this process, each in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

from ...core.errors import DeviceLost, StageError, StageLost
from ...core.interfaces import StageMemory
from ...core.steps import StepInput, StepOutput
from ..loop_calls import call_on_loop
from ..transport.stage_spec import (
    InFlightSteps,
    Spans,
    StageResult,
    StageRunner,
    run_stage,
    run_traced,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
# How long `close` waits for the step that a stage is at.
CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """A step on its way from stage to stage. `answer` takes its output or error, in any thread."""

    step: StepInput
    answer: Callable[[StageResult], None]
    hidden: torch.Tensor | None = None
    spans: Spans = ()


class LocalPipeline:
    """Runs steps through stages of this process while the event loop goes on.

    No copy stands between the stages. With several of them as many steps are under way as stages,
    and one waits, so that no stage waits for the engine; with one there is nothing to overlap.

    max_in_flight  default: one more than stages; 1 with one stage

    After a `DeviceLost` every step gets that error: the process must be replaced. So it is after a
    step that never ends, since a thread cannot be ended.
    """

    def __init__(self, stages: Sequence[StageRunner], max_in_flight: int | None = None) -> None:
        assert stages, "a pipeline has at least one stage"
        self._stages = tuple(stages)
        self._num_stages = len(stages)
        self._num_blocks = min(stage.num_blocks for stage in stages)
        self._memory = tuple(stage.memory for stage in stages)
        self._max_in_flight = max_in_flight or len(stages) + (len(stages) > 1)
        self._steps: InFlightSteps | None = None
        self._threads: list[_StageThread] = []
        self._device_lost: DeviceLost | None = None

    @property
    def num_stages(self) -> int:
        """See `Pipeline`."""
        return self._num_stages

    @property
    def max_in_flight(self) -> int:
        """See `Pipeline`."""
        return self._max_in_flight

    @property
    def num_blocks(self) -> int:
        """See `Pipeline`."""
        return self._num_blocks

    @property
    def memory(self) -> Sequence[StageMemory]:
        """See `Pipeline`."""
        return self._memory

    @property
    def decodes_several(self) -> bool:
        """See `Pipeline`; a stage alone may, once it runs the CPU kernels."""
        return len(self._stages) == 1 and self._stages[0].decodes_several

    async def start(self) -> None:
        """See `Pipeline`; the stages are built already."""
        self._steps = InFlightSteps(self._max_in_flight)
        for index in reversed(range(len(self._stages))):
            following = self._threads[0] if self._threads else None
            self._threads.insert(0, _StageThread(index, self._stages[index], following))

    def submit(self, step: StepInput) -> asyncio.Future[StepOutput]:
        """See `Pipeline`."""
        loop = asyncio.get_running_loop()
        steps = self._steps
        if steps is None or self._device_lost is not None:
            future: asyncio.Future[StepOutput] = loop.create_future()
            future.set_exception(self._device_lost or StageLost("the pipeline is not open"))
            return future
        sequence, future = steps.add()

        def answer(result: StageResult) -> None:
            call_on_loop(loop, self._answer, steps, sequence, result)

        self._threads[0].put(_Work(step, answer))
        return future

    def _answer(self, steps: InFlightSteps, sequence: int, result: StageResult) -> None:
        if isinstance(result, DeviceLost):
            # The stages are of no use to this process, however often the pipeline is opened.
            self._device_lost = self._device_lost or result
            steps.lose(str(result), DeviceLost)
        else:
            steps.answer(sequence, result)

    async def restart(self) -> tuple[int, ...]:
        """See `Pipeline`; the stages stay. Raises `DeviceLost` where one is lost."""
        await self._end_threads()
        if self._device_lost is not None:
            raise self._device_lost
        for stage in self._stages:
            stage.reset()
        await self.start()
        return ()

    async def close(self) -> None:
        """See `Pipeline`; it cannot be started again.

        Whoever keeps a closed engine keeps no model: another one may need a GPU's whole memory.
        """
        await self._end_threads()
        self._stages = ()

    async def _end_threads(self) -> None:
        """End the steps. A stage that is stuck counts as a device that is lost."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.end("the pipeline was closed")
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.put(None)
        for thread in threads:
            if not await asyncio.to_thread(thread.ended, CLOSE_TIMEOUT_S):
                reason = f"stage {thread.index} hangs in this process"
                logger.error("event=stage_hangs stage=%d", thread.index)
                self._device_lost = self._device_lost or DeviceLost(reason)


class _StageThread:
    """Runs one stage's steps in order, and hands each on to the next stage, or its answer out."""

    def __init__(self, index: int, stage: StageRunner, following: _StageThread | None) -> None:
        self.index = index
        self._stage = stage
        self._following = following
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        # One that hangs must not keep the process alive.
        self._thread = threading.Thread(
            target=self._run, name=f"draftline-stage-{index}", daemon=True
        )
        self._thread.start()

    def put(self, work: _Work | None) -> None:
        """Queue a step; None ends the thread when it has done what is queued."""
        self._queue.put(work)

    def ended(self, timeout_s: float) -> bool:
        """Whether the thread ends in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                result, spans = self._result(work)
            except (StageError, StageLost) as error:
                work.answer(error)
                continue
            if isinstance(result, StepOutput):
                work.answer(result)
            elif self._following is not None:
                self._following.put(_Work(work.step, work.answer, result, spans))
            else:
                reason = f"stage {self.index} gave hidden states in place of an answer"
                work.answer(StageError(reason))

    def _result(self, work: _Work) -> tuple[torch.Tensor | StepOutput, Spans]:
        if work.step.is_traced:
            return run_traced(self.index, self._stage, work.step, work.hidden, work.spans)
        return run_stage(self.index, self._stage, work.step, work.hidden), ()
