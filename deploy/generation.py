"""Runs a validated request: its prompts become one merged stream of deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from ..core.errors import StageLost
from ..core.output import Delta, FinishReason, RequestMetrics
from ..core.request_options import RequestOptions
from ..core.sampling_params import SamplingParams
from .engine_face import EngineFace
from .metrics import ServerMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to generate.

    deadline  time of the event loop's clock after which the request ends with 408; None: never
    report    whether the answer names the source of every token
    """

    request_id: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    options: RequestOptions
    report: bool
    deadline: float | None


@dataclass(slots=True)
class Answer:
    """What one prompt has got so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    metrics: RequestMetrics | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.sources += delta.sources
        self.finish_reason = delta.finish_reason
        self.metrics = delta.metrics


async def run_job(
    face: EngineFace, job: Job, recorder: ServerMetrics
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Deltas of all prompts with the index of their prompt, in the order in which they come.

    Closing the generator cancels what still runs. Raises what `EngineFace.stream` raises, and
    `TimeoutError` after the job's deadline.
    """
    streams = [
        face.stream(
            prompt,
            job.params,
            job.options,
            request_id=f"{job.request_id}-{index}",
        )
        for index, prompt in enumerate(job.prompts)
    ]
    last: dict[int, float] = {}
    now = asyncio.get_running_loop().time
    merge = _merge(streams) if len(streams) > 1 else _only(streams[0])
    async with aclosing(merge) as merged:
        while True:
            async with asyncio.timeout_at(job.deadline):
                item = await anext(merged, None)
            if item is None:
                return
            index, delta = item
            if index in last:
                recorder.record_gap(now() - last[index])
            last[index] = now()
            if delta.finish_reason == "cancelled":
                raise StageLost("the request was cancelled by the server")
            if delta.finish_reason is not None and delta.metrics is not None:
                recorder.record_finish(delta.finish_reason, delta.metrics)
            yield item


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
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[Delta, None]) -> Delta | None:
    return await anext(stream, None)
