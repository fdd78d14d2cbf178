"""Runs a validated request: its prompts become one merged stream of deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ....core.errors import StageLost
from ....core.request.output import Delta, FinishReason, RequestMetrics, StopReason, TokenLogProb
from ....core.request.sampling_params import RequestOptions, SamplingParams
from ...settings.settings import RequestLimits
from ..engine_client import EngineClient
from ..http.metrics import AnswerRecorder
from ..http.middleware import log_answer
from .stream_pace import Pace

if TYPE_CHECKING:
    from ...observe.spans import RequestSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to generate: one answer to each prompt; a prompt may be listed several times.

    params       of each answer
    num_choices  answers to one prompt; they stand side by side
    echo         texts of the prompts, which the answers begin with; none: they do not
    deadline     time of the event loop's clock after which the request ends with 408; None: never
    report       whether the answer names the source of every token
    wants_ids    whether the answer names its tokens and those of the prompt
    wants_usage  whether every part of a stream counts the tokens so far
    pace         of the deltas; None: they are sent as they come
    charge       called with the number of newly generated tokens; None: they are not counted
    shows_trees  whether a report holds the trees of steps
    spans        of a request that is traced, whose deltas have trees then
    """

    request_id: str
    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    num_choices: int
    echo: Sequence[str]
    options: RequestOptions
    report: bool
    deadline: float | None
    wants_ids: bool = False
    wants_usage: bool = False
    pace: Pace | None = None
    charge: Callable[[int], object] | None = None
    shows_trees: bool = False
    spans: RequestSpans | None = None

    def answers(self) -> list[CompletionOutput]:
        """An empty answer for each prompt."""
        echo = self.echo or [None] * len(self.prompts)
        parts = zip(self.prompts, self.params, echo, strict=True)
        return [
            CompletionOutput(
                prompt_ids=prompt,
                params=params,
                echo=text,
                wants_ids=self.wants_ids,
                wants_usage=self.wants_usage,
            )
            for prompt, params, text in parts
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of an answer as a client sees it, or the whole.

    is_first         nothing came before it
    echo             the prompt's text, which the answer begins with; None: it does not
    log_probs        of its tokens, None for the first token of an echoed prompt; None: not wanted
    prompt_log_probs of the prompt, where they are wanted beside the answer
    token_ids        its tokens; None: not wanted
    num_answered     tokens of the answer up to its end, where they are to be counted
    stop_reason      the stop text or token that ended the answer
    """

    text: str
    finish_reason: FinishReason | None
    is_first: bool
    echo: str | None
    prompt_ids: Sequence[int]
    log_probs: Sequence[TokenLogProb | None] | None
    prompt_log_probs: Sequence[TokenLogProb | None] | None
    token_ids: Sequence[int] | None = None
    num_answered: int | None = None
    stop_reason: StopReason = None


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """The answer to one prompt so far. `echo` is the text that it begins with."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    echo: str | None
    wants_ids: bool = False
    wants_usage: bool = False
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None
    metrics: RequestMetrics | None = None
    log_probs: list[TokenLogProb | None] = field(default_factory=list)
    prompt_log_probs: Sequence[TokenLogProb | None] | None = None

    def add(self, delta: Delta) -> Piece:
        """Append a delta; returns the piece that it adds."""
        is_first = not self.token_ids
        text, log_probs = delta.text, list[TokenLogProb | None](delta.log_probs)
        if is_first:
            self.prompt_log_probs = delta.prompt_log_probs
        if is_first and self.echo is not None:
            text = self.echo + text
            log_probs = [*(delta.prompt_log_probs or ()), *log_probs]
        self.text += text
        self.log_probs += log_probs
        self.token_ids += delta.token_ids
        self.sources += delta.sources
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.metrics = delta.metrics
        return self._piece(text, log_probs, delta.token_ids, is_first=is_first)

    def whole(self) -> Piece:
        """The whole answer so far as one piece."""
        return self._piece(self.text, self.log_probs, self.token_ids, is_first=True)

    def _piece(
        self,
        text: str,
        log_probs: list[TokenLogProb | None],
        token_ids: Sequence[int],
        *,
        is_first: bool,
    ) -> Piece:
        params = self.params
        return Piece(
            text=text,
            finish_reason=self.finish_reason,
            is_first=is_first,
            echo=self.echo,
            prompt_ids=self.prompt_ids,
            log_probs=None if params.logprobs is None else log_probs,
            prompt_log_probs=self.prompt_log_probs if self.echo is None else None,
            token_ids=list(token_ids) if self.wants_ids else None,
            num_answered=len(self.token_ids) if self.wants_usage else None,
            stop_reason=self.stop_reason,
        )


async def run_job(
    engine_client: EngineClient, job: Job, recorder: AnswerRecorder
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Deltas of all prompts with the index of their prompt, in the order in which they come.

    Closing the generator cancels what still runs. Raises what `EngineClient.stream` raises, and
    `TimeoutError` after the job's deadline.
    """
    streams = [_stream(engine_client, job, index) for index in range(len(job.prompts))]
    last: dict[int, float] = {}
    now = asyncio.get_running_loop().time
    merge = _merge(streams) if len(streams) > 1 else _only(streams[0])
    with job.spans or nullcontext():
        async with aclosing(merge) as merged:
            while True:
                async with asyncio.timeout_at(job.deadline):
                    item = await anext(merged, None)
                if item is None:
                    return
                index, delta = item
                came_at = now()
                if job.charge is not None:
                    job.charge(len(delta.token_ids))
                recorder.record(delta, came_at - last[index] if index in last else None)
                last[index] = came_at
                _record(job, index, delta)
                if delta.finish_reason == "cancelled":
                    raise StageLost("the request was cancelled by the server")
                yield item


def _record(job: Job, index: int, delta: Delta) -> None:
    """Record a delta in the request's spans and the log."""
    if job.spans is not None:
        job.spans.note(index, delta)
    if delta.finish_reason is not None and delta.metrics is not None:
        log_answer(job.request_id, delta.finish_reason, delta.metrics)


def _stream(engine_client: EngineClient, job: Job, index: int) -> AsyncGenerator[Delta, None]:
    """The answer to one of the prompts, at the job's pace."""
    prompt, request_id = job.prompts[index], f"{job.request_id}-{index}"
    deltas = engine_client.stream(prompt, job.params[index], job.options, request_id=request_id)
    if job.pace is None:
        return deltas
    return job.pace.paced(deltas, engine_client.codec.text_stream(prompt, job.params[index]))


async def _only(stream: AsyncGenerator[Delta, None]) -> AsyncGenerator[tuple[int, Delta], None]:
    async with aclosing(stream):
        async for delta in stream:
            yield 0, delta


async def _merge(
    streams: Sequence[AsyncGenerator[Delta, None]],
) -> AsyncGenerator[tuple[int, Delta], None]:
    waiting: dict[asyncio.Task[Delta | None], int] = {}
    try:
        for index, stream in enumerate(streams):
            waiting[asyncio.create_task(_next(stream))] = index
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                delta = task.result()
                if delta is not None:
                    waiting[asyncio.create_task(_next(streams[index]))] = index
                    yield index, delta
                    # Many deltas may come at once; other tasks run between them.
                    await asyncio.sleep(0)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[Delta, None]) -> Delta | None:
    return await anext(stream, None)


def check_logprobs(
    params: SamplingParams,
    prompts: Sequence[Sequence[int]],
    num_choices: int,
    context_len: int,
    limits: RequestLimits,
) -> None:
    """Raise `RequestError` where prompts or answers would have more than the limits allow.

    `num_choices`: answers to each prompt.
    """
    if params.prompt_logprobs is not None:
        num_tokens = num_choices * sum(map(len, prompts))
        limits.require(
            "max_logprob_entries",
            num_tokens * (1 + params.prompt_logprobs),
            "prompt_logprobs",
            "log-probabilities of prompts (tokens of all prompts, times n, times 1 + their number)",
        )
    if params.logprobs is not None:
        most = context_len if params.max_tokens is None else params.max_tokens
        limits.require(
            "max_answer_logprobs",
            num_choices * len(prompts) * most * (1 + params.logprobs),
            "logprobs",
            "log-probabilities of answers (max_tokens of all answers, times 1 + their number)",
        )
