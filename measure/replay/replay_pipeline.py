"""Pipelines of recorded answers: one replays them, one notes what drafters probe."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import numpy as np

from ...cluster.transport.stage_spec import Pipeline
from ...core.arrays import Int32
from ...core.interfaces import StageMemory
from ...core.steps import LogProbOutput, StepInput, StepOutput
from .recording import ProbedTokens, RecordedAnswer, RowContext, off_text, probed_contexts

Ids = tuple[int, ...]
# Longest context suffix that is looked up, in tokens.
MAX_END = 6


class Predictions:
    """The most probable next tokens, best first, exact or approximated by a recording."""

    __slots__ = ("_after_ends", "_off_text", "_on_text", "_prompt_lens", "_texts")  # fmt: skip

    def __init__(self, answers: Sequence[RecordedAnswer]) -> None:
        self._texts = {answer.seed: answer.text_ids for answer in answers}
        self._prompt_lens = {answer.seed: len(answer.prompt_ids) for answer in answers}
        self._on_text = {answer.seed: answer.top_next_tokens for answer in answers}
        self._off_text = {
            (answer.seed, off.start, off.tokens): off.ids
            for answer in answers
            for off in answer.off_text
        }
        self._after_ends: dict[Ids, Ids] = {}
        for answer in answers:
            self._learn(answer)

    def after(self, context: RowContext) -> Ids:
        """The most probable next tokens after `context`, best first.

        Exact if the recording has the whole context; else those after its longest recorded suffix;
        empty if there is none.
        """
        seed = context.seed
        text = self._texts.get(seed, ())
        start, tokens = off_text(text, context.start, context.tokens)
        if tokens:
            ids = self._off_text.get((seed, start, tokens))
        else:
            index = start - self._prompt_lens[seed]
            ids = self._on_text[seed][index] if index < len(self._on_text[seed]) else None
        if ids is not None:
            return ids
        end = (text[max(0, start - MAX_END) : start] + tokens)[-MAX_END:]
        for first in range(len(end)):
            if (ids := self._after_ends.get(end[first:])) is not None:
                return ids
        return ()

    def _learn(self, answer: RecordedAnswer) -> None:
        text = answer.text_ids
        for position, ids in enumerate(answer.top_next_tokens, len(answer.prompt_ids)):
            self._learn_ends(text[max(0, position - MAX_END) : position], ids)
        for off in answer.off_text:
            before = text[max(0, off.start - MAX_END) : off.start]
            self._learn_ends((before + off.tokens)[-MAX_END:], off.ids)

    def _learn_ends(self, context: Ids, ids: Ids) -> None:
        for first in range(len(context)):
            known = self._after_ends.get(context[first:], ())
            if len(ids) >= len(known):
                self._after_ends[context[first:]] = ids


class ReplayPipeline:
    """Answers the steps of requests that repeat recorded ones; the seed identifies a request.

    Verification only follows rows of the recorded text, so the committed tokens are exactly the
    recorded ones. Drafters that request the target's predictions get the recorded ones if the
    recording has the row's whole context. Otherwise they get those after its longest recorded
    suffix. These are approximate, and so are later proposals of such drafters.
    """

    num_stages = 1
    max_in_flight = 1
    decodes_several = False
    # There is no cache; this is the default of a CPU.
    num_blocks = 1024
    memory = (StageMemory(0, 0),)

    def __init__(self, answers: Sequence[RecordedAnswer]) -> None:
        self._texts = {answer.seed: answer.text_ids for answer in answers}
        self._predictions = Predictions(answers)

    async def start(self) -> None:
        """Do nothing."""

    def submit(self, step: StepInput) -> asyncio.Future[StepOutput]:
        """The result of a step, in a completed future."""
        answer: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        answer.set_result(self._answer(step))
        return answer

    async def restart(self) -> tuple[int, ...]:
        """Do nothing."""
        return ()

    async def close(self) -> None:
        """Do nothing."""

    def _answer(self, step: StepInput) -> StepOutput:
        draws = zip(step.sampling.seed.tolist(), step.sampling.position.tolist(), strict=True)
        targets = [self._token(seed, position) for seed, position in draws]
        return StepOutput(
            step_id=step.step_id,
            target_tokens=np.array(targets, dtype=np.int32),
            probe_ids=self._top_next_tokens(step),
            log_probs=LogProbOutput(
                scores=np.zeros(len(step.log_probs.scored_rows), dtype=np.float32)
            ),
        )

    def _token(self, seed: int, position: int) -> int:
        """The recorded token at a position; 0 beyond the end, and for requests of the warm-up."""
        text = self._texts.get(seed, ())
        return text[position] if position < len(text) else 0

    def _top_next_tokens(self, step: StepInput) -> Int32:
        top_ids = np.zeros((len(step.probes.rows), step.probes.top_k), dtype=np.int32)
        if len(top_ids):
            for row, context in zip(top_ids, probed_contexts(step), strict=True):
                ids = self._predictions.after(context)[: len(row)]
                row[: len(ids)] = ids
        return top_ids


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

    @property
    def memory(self) -> Sequence[StageMemory]:
        """What the pipeline's stages keep."""
        return self._pipeline.memory

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
    """Collects in `probed` the target's most probable tokens after each row that drafters probe.

    It collects while `probed` is not None.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self.probed: ProbedTokens | None = None

    @property
    def decodes_several(self) -> bool:
        """As of the pipeline while nothing is collected, so that served steps are measured."""
        return self.probed is None and self._pipeline.decodes_several

    def submit(self, step: StepInput) -> Awaitable[StepOutput]:
        """Send a step, and observe its result."""
        result = super().submit(step)
        if self.probed is None or not len(step.probes.rows):
            return result
        return self._collected(step, result, self.probed)

    @staticmethod
    async def _collected(
        step: StepInput, result: Awaitable[StepOutput], probed: ProbedTokens
    ) -> StepOutput:
        output = await asyncio.ensure_future(result)
        assert output.probe_ids is not None
        for context, ids in zip(probed_contexts(step), output.probe_ids.tolist(), strict=True):
            # Rows may request different numbers of tokens.
            if len(ids) > len(probed.get(context, ())):
                probed[context] = tuple(ids)
        return output
