"""A pipeline of real stages that are told their steps by messages, and that can be lost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from draftline.cluster.transport.messages import (
    StepPayloads,
    StepReader,
    StepWriter,
    decode_result,
    encode_result,
)
from draftline.cluster.transport.stage_spec import StageSpec, run_stage
from draftline.core.errors import StageError, StageLost
from draftline.core.steps import StepInput, StepOutput


class MessagePipeline:
    """Runs each step at once, its stages in this thread.

    lost_at  numbers of steps, ascending, from which on one gets no answer: the first that takes no
             request along whose last steps were lost already, since an engine ends those. Stages
             take turns to die of it: that one is told nothing of the past, the others keep
             whatever they were told
    """

    def __init__(self, specs: Sequence[StageSpec], lost_at: Sequence[int] = ()) -> None:
        self._lost_at = deque(lost_at)
        self._is_lost = False
        # Requests of lost steps that had no answer since, and those of the last steps.
        self._unanswered: set[int] = set()
        self._last: deque[set[int]] = deque()
        self._stages = [spec.build() for spec in specs]
        self._readers = [StepReader() for _ in specs]
        self.num_steps = self.num_restarts = 0
        self.max_in_flight = len(specs)
        self.num_stages = len(specs)
        self.decodes_several = False
        self.num_blocks = specs[0].num_blocks or 0
        self.memory = tuple(stage.memory for stage in self._stages)

    async def start(self) -> None:
        """A run of its own."""
        self._is_lost = False
        self._writer = StepWriter(1000 + self.num_restarts)

    def submit(self, step: StepInput) -> asyncio.Future[StepOutput]:
        """See `Pipeline`."""
        future = asyncio.get_running_loop().create_future()
        self.num_steps += 1
        self._is_lost = self._is_lost or self._loses(set(step.request_keys))
        if self._is_lost:
            # A step that was told to some stages, and never to all.
            self._readers[0].read(self._writer.write(self.num_steps, step).rows)
            future.set_exception(StageLost("a stage is dead"))
            return future
        answer = self._answer(self._writer.write(self.num_steps, step))
        if isinstance(answer, StepOutput):
            future.set_result(answer)
        else:
            future.set_exception(answer)
        return future

    async def restart(self) -> tuple[int, ...]:
        """See `Pipeline`."""
        victim = self.num_restarts % self.num_stages
        self.num_restarts += 1
        for stage in self._stages:
            stage.reset()
        # As a new process with the same weights: it was told nothing.
        self._readers[victim] = StepReader()
        await self.start()
        return (victim,)

    async def close(self) -> None:
        """See `Pipeline`."""

    def _loses(self, keys: set[int]) -> bool:
        """Whether the step is the last of this run."""
        self._last.append(keys)
        involved = set().union(*self._last)
        if self._lost_at and self.num_steps >= self._lost_at[0] and not involved & self._unanswered:
            self._lost_at.popleft()
            self._unanswered |= involved
            self._last.clear()
            return True
        # An answer may still wait to be read.
        if len(self._last) > self.max_in_flight:
            self._unanswered -= self._last.popleft()
        return False

    def _answer(self, payloads: StepPayloads) -> StepOutput | StageError | StageLost:
        told = [*[payloads.rows] * (len(self._stages) - 1), payloads.whole]
        # All read it, whoever fails: the next step is told as what differs from this one.
        read = [reader.read(message) for reader, message in zip(self._readers, told, strict=True)]
        result = None
        try:
            for index, (stage, (_, step)) in enumerate(zip(self._stages, read, strict=True)):
                assert not isinstance(result, StepOutput)
                result = run_stage(index, stage, step, result)
        except (StageError, StageLost) as error:
            return error
        assert isinstance(result, StepOutput)
        _, answer = decode_result(encode_result(self.num_steps, result))
        return answer
