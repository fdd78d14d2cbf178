"""The steps of one pipeline run that were sent and not yet answered."""

from __future__ import annotations

import asyncio
import logging

from ...core.errors import CapacityError, StageError, StageLost
from ...core.steps import StepOutput
from .messages import StageResult

logger = logging.getLogger(__name__)


class InFlightSteps:
    """Futures of the unanswered steps, by sequence number. Used on one event loop only.

    One object serves from a start of the stages to their end, so that late messages of stages
    that are gone never reach the steps of the stages that follow them.
    """

    def __init__(self, limit: int) -> None:
        self.lost = asyncio.Event()
        self._limit = limit
        self._futures: dict[int, asyncio.Future[StepOutput]] = {}
        self._next = 0
        self._reason = ""
        self._kind: type[StageLost] = StageLost

    def add(self) -> tuple[int, asyncio.Future[StepOutput]]:
        """The sequence number and the future of a new step. Raises `CapacityError`."""
        if len(self._futures) >= self._limit:
            raise CapacityError(f"{self._limit} steps are in flight; wait for an answer first")
        sequence, self._next = self._next, self._next + 1
        future = asyncio.get_running_loop().create_future()
        self._futures[sequence] = future
        return sequence, future

    def answer(self, sequence: int, answer: StageResult) -> None:
        """Settle a step; the second answer to it and answers after a loss are ignored.

        A `StageLost` in the place of an answer is of no step: see `lose`.
        """
        if isinstance(answer, StageLost):
            self.lose(str(answer))
            return
        future = self._futures.pop(sequence, None)
        if future is None or future.done():
            return
        if isinstance(answer, StageError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def lose(self, reason: str, kind: type[StageLost] = StageLost) -> None:
        """Fail every unanswered step with an error of this kind; the first reason stays."""
        if self.lost.is_set():
            return
        logger.info("event=stage_lost in_flight=%d reason=%r", len(self._futures), reason)
        self.end(reason, kind)

    def end(self, reason: str, kind: type[StageLost] = StageLost) -> None:
        """As `lose`, where nothing went wrong: the pipeline was closed."""
        if not self._reason:
            self._reason, self._kind = reason, kind
        self.lost.set()
        futures, self._futures = self._futures, {}
        for future in futures.values():
            if not future.done():
                future.set_exception(self.error())
                # Told for all steps at once: asyncio need not complain of those nobody waits for.
                future.exception()

    def error(self) -> StageLost:
        """Why steps cannot be sent now."""
        return self._kind(self._reason or "the pipeline is not open")
