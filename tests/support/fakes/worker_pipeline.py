"""A pipeline of real stages that are told their steps by messages, and that can be lost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from draftline.cluster.transport.messages import StepWriter, decode_result
from draftline.cluster.transport.stage_spec import StageRunner, StageSpec
from draftline.cluster.transport.stage_worker import StageWorker
from draftline.core.errors import StageError, StageLost
from draftline.core.steps import StepInput, StepOutput


class WorkerPipeline:
    """Runs each step at once, through the workers of a compiled graph, without Ray.

    lost_at  numbers of steps, ascending, from which on one gets no answer: the first that takes no
             request along whose last steps were lost already, since an engine ends those. Stages
             take turns to die of it: that one is told nothing of the past, the others keep their
             process and whatever they were told
    """

    def __init__(self, specs: Sequence[StageSpec], lost_at: Sequence[int] = ()) -> None:
        self._specs = specs
        self._lost_at = deque(lost_at)
        self._is_lost = False
        # Requests of lost steps that had no answer since, and those of the last steps.
        self._unanswered: set[int] = set()
        self._last: deque[set[int]] = deque()
        self._workers = [self._worker(index, spec.build()) for index, spec in enumerate(specs)]
        self.num_steps = self.num_restarts = self.num_bytes = 0
        self.max_in_flight = len(specs)
        self.num_stages = len(specs)
        self.decodes_several = False
        self.num_blocks = specs[0].num_blocks or 0

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
            self._workers[0].run_payload(self._writer.write(self.num_steps, step).whole, b"lost")
            future.set_exception(StageLost("a stage is dead"))
            return future
        answer = self._answer(self._writer.write(self.num_steps, step).whole)
        if isinstance(answer, StepOutput):
            future.set_result(answer)
        else:
            future.set_exception(answer)
        return future

    async def restart(self) -> tuple[int, ...]:
        """See `Pipeline`."""
        victim = self.num_restarts % len(self._specs)
        self.num_restarts += 1
        for worker in self._workers:
            assert worker._stage is not None
            worker._stage.reset()
        # As a new process with the same weights: it was told nothing.
        self._workers[victim] = self._worker(victim, self._workers[victim]._stage)
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

    def _answer(self, payload: bytes) -> StepOutput | StageError | StageLost:
        self.num_bytes += len(payload)
        carried: Any = None
        for worker in self._workers:
            carried = worker.run_payload(payload, carried)
        _, answer = decode_result(carried)
        return answer

    def _worker(self, index: int, stage: StageRunner | None) -> StageWorker:
        worker = StageWorker()
        worker._index, worker._spec, worker._stage = index, self._specs[index], stage
        return worker
