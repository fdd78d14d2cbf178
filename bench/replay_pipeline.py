"""A pipeline without a model: it says what a recorded target said."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from ..core.types import Int32, StepInput, StepOutput
from .recording import RecordedAnswer


class ReplayPipeline:
    """Answers the steps of requests that repeat recorded ones; a request is known by its seed.

    The walk only ever asks after rows of the text itself, for whose positions the recording has the
    token, so what is committed is exactly what was recorded. Drafters that ask for the target's
    predictions get the recorded ones after tokens of the text; after others, which the target saw
    in no context that was recorded, those that it last had after the same token. That is a guess,
    and makes what such drafters propose later a guess, too.
    """

    num_stages = 1
    max_in_flight = 1

    def __init__(self, answers: Sequence[RecordedAnswer]) -> None:
        self._answers = {answer.seed: _Replayed(answer) for answer in answers}
        self._last_seen: dict[int, tuple[int, ...]] = {}

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
        targets = [
            self._answers[seed].token(position) if seed in self._answers else 0
            for seed, position in places
        ]
        return StepOutput(
            step_id=step.step_id,
            target_tokens=np.array(targets, dtype=np.int32),
            probe_ids=self._successors(step),
            scores=np.zeros(len(step.scored_rows), dtype=np.float32),
        )

    def _successors(self, step: StepInput) -> Int32:
        found = np.zeros((len(step.probe_rows), step.probe_top_k), dtype=np.int32)
        owners = np.searchsorted(step.request_starts, step.probe_rows, side="right") - 1
        # A request that is asked for predictions has a root, which gets a target token.
        first = np.searchsorted(step.logits_rows, step.request_starts[owners])
        rows = zip(
            step.sampling.seed[first].tolist() if len(first) else [],
            step.token_ids[step.probe_rows].tolist(),
            step.positions[step.probe_rows].tolist(),
            strict=True,
        )
        for row, (seed, token, position) in zip(found, rows, strict=True):
            known = self._answers[seed].successors(token, position)
            if known is None:
                known = self._last_seen.get(token, ())
            else:
                self._last_seen[token] = known
            row[: len(known)] = known[: len(row)]
        return found


class _Replayed:
    """One recorded answer by absolute positions."""

    __slots__ = ("_prompt_len", "_successors", "_text")

    def __init__(self, answer: RecordedAnswer) -> None:
        self._text = answer.prompt_ids + answer.answer_ids
        self._prompt_len = len(answer.prompt_ids)
        self._successors = answer.successors

    def token(self, position: int) -> int:
        """The token at a position; any beyond the end."""
        return self._text[position] if position < len(self._text) else 0

    def successors(self, token: int, position: int) -> tuple[int, ...] | None:
        """The target's predictions after `token` at `position`, if that stands there."""
        index = position + 1 - self._prompt_len
        if 0 <= index < len(self._successors) and self._text[position] == token:
            return self._successors[index]
        return None
