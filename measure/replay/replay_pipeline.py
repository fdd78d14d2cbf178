"""A pipeline without a model: it says what a recorded target said."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from ...core.arrays import Int32
from ...core.steps import StepInput, StepOutput
from .predictions import Predictions
from .recording import RecordedAnswer
from .row_contexts import probed_contexts


class ReplayPipeline:
    """Answers the steps of requests that repeat recorded ones; a request is known by its seed.

    The walk only ever asks after rows of the text itself, for whose positions the recording has the
    token, so what is committed is exactly what was recorded. Drafters that ask for the target's
    predictions get the recorded ones, wherever the recording has the row's whole context; where it
    has not, those after the longest end of the context that it knows. That is a guess, and makes
    what such drafters propose later a guess, too.
    """

    num_stages = 1
    max_in_flight = 1
    # There is no cache; as many as a CPU has by default.
    num_blocks = 1024

    def __init__(self, answers: Sequence[RecordedAnswer]) -> None:
        self._texts = {answer.seed: answer.text_ids for answer in answers}
        self._predictions = Predictions(answers)

    async def start(self) -> None:
        """There is nothing to start."""

    def submit(self, step: StepInput) -> asyncio.Future[StepOutput]:
        """The future is done."""
        answer: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        answer.set_result(self._answer(step))
        return answer

    async def close(self) -> None:
        """There is nothing to end."""

    def _answer(self, step: StepInput) -> StepOutput:
        places = zip(step.sampling.seed.tolist(), step.sampling.position.tolist(), strict=True)
        targets = [self._token(seed, position) for seed, position in places]
        return StepOutput(
            step_id=step.step_id,
            target_tokens=np.array(targets, dtype=np.int32),
            probe_ids=self._top_next_tokens(step),
            scores=np.zeros(len(step.scored_rows), dtype=np.float32),
        )

    def _token(self, seed: int, position: int) -> int:
        """The token at a position; any beyond the end, and for requests that are warmed up with."""
        text = self._texts.get(seed, ())
        return text[position] if position < len(text) else 0

    def _top_next_tokens(self, step: StepInput) -> Int32:
        found = np.zeros((len(step.probe_rows), step.probe_top_k), dtype=np.int32)
        if len(found):
            for row, context in zip(found, probed_contexts(step), strict=True):
                ids = self._predictions.after(context)[: len(row)]
                row[: len(ids)] = ids
        return found
