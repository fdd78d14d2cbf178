"""The engine as Python sees it: `Engine` for scripts, `AsyncEngine` for servers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Self

from ...cluster.config import EngineConfig
from ...cluster.engine.engine_thread import EngineThread
from ...cluster.engine.request_factory import Prompt
from ...cluster.loop_calls import off_loop
from ...core.errors import CapacityError, DraftlineError, RequestError
from ...core.request.output import Delta, OutputCollector, RequestOutput
from ...core.request.request import Sink
from ...core.request.sampling_params import RequestOptions, SamplingParams
from .delta_queue import DeltaQueue
from .async_engine import Replica, is_light
from .stats import retry_after_s


class Engine(Replica):
    """An engine for scripts: blocking calls, whole answers. A context manager.

    Raises `ConfigError`, `CheckpointError` or `StoreError` when it cannot start.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._start()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | None = None,
    ) -> list[RequestOutput]:
        """Answers of all prompts, in order; they run together.

        params: of all prompts, or of each. `RequestOptions(speculative=False)` decodes plainly; the
        answers are the same. Raises `RequestError` if a prompt does not fit or there are not as
        many parameters as prompts, `CapacityError` if there are more than the queue holds,
        `StageLost`, `EngineClosed`.
        """
        if isinstance(prompts, str):
            # It would be taken for a list of its letters.
            raise RequestError("prompts", "must be a list of prompts; write [prompt]")
        options = options or RequestOptions()
        answers = []
        with _cancelling(self._thread) as running:
            for prompt, own in zip(prompts, _of_each(params, len(prompts)), strict=True):
                answer = OutputCollector(f"request-{uuid.uuid4().hex}")
                preparing = self._constraint(own)
                answer.prompt_ids = self._add(
                    answer.request_id,
                    prompt,
                    own,
                    answer.on_output,
                    options,
                    None if preparing is None else preparing.result(),
                )
                running.append(answer.request_id)
                answers.append(answer)
            self._thread.take_enqueued()
            # What was refused is told before others are waited for.
            for answer in answers:
                if answer.error is not None:
                    raise answer.error
            return [answer.wait() for answer in answers]

    def close(self) -> None:
        """End all requests and free everything; a second call does nothing."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncEngine(Replica):
    """An engine for servers: streams of deltas on the caller's event loop."""

    async def start(self) -> None:
        """Load stages and drafters. Raises `ConfigError`, `CheckpointError` or `StoreError`."""
        await asyncio.to_thread(self._start)

    async def close(self) -> None:
        """End all requests and free everything; a second call does nothing."""
        await asyncio.to_thread(self._stop)

    async def add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
        sink: Sink,
        *,
        with_text: bool = True,
    ) -> None:
        """Queue a request between two steps, without waiting for that.

        `sink` gets its deltas, and the error that ends it, in any thread. `with_text`: as of
        `RequestFactory.build`. Raises `RequestError`, `EngineClosed`, `EngineFailed`.
        """
        # It may take seconds, in a process of its own.
        preparing = self._constraint(params)
        constraint = None if preparing is None else await asyncio.wrap_future(preparing)
        watched = self._shadow.watch(params, options, sink)
        own = sink if watched is None else watched.on_output
        parts = (request_id, prompt, params, self._counted(own), options, constraint)
        if is_light(prompt, params, options.answered):
            request, stop = self._prepare(*parts, with_text=with_text)
        else:
            request, stop = await off_loop(self._prepare, *parts, with_text=with_text)
        if watched is not None:
            watched.request = request
        self._thread.enqueue(request, stop)

    def cancel(self, request_id: str) -> None:
        """End a request that was added, soon; an unknown id is ignored."""
        self._thread.cancel(request_id)

    def after_step(self, function: Callable[[], object]) -> None:
        """For sinks: run `function` once all sinks have heard of the step; at once elsewhere."""
        self._thread.after_step(function)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        request_id: str | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Deltas of one answer as they are committed; closing the iterator cancels the request.

        Raises `RequestError`, `CapacityError`, `StageLost`, `EngineClosed`.
        """
        batches = self.stream_batches(prompt, params, options, request_id=request_id)
        async with aclosing(batches):
            async for deltas in batches:
                for delta in deltas:
                    yield delta

    async def stream_batches(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        request_id: str | None = None,
        with_text: bool = True,
    ) -> AsyncGenerator[list[Delta], None]:
        """As `stream`, all deltas at once that wait to be read."""
        request_id = request_id or f"request-{uuid.uuid4().hex}"
        params, options = params or SamplingParams(), options or RequestOptions()
        deltas = DeltaQueue[Delta](
            asyncio.get_running_loop(),
            self._max_unread_bytes,
            on_full=lambda: self._thread.cancel(request_id),
        )
        adding = asyncio.create_task(
            self.add(request_id, prompt, params, options, deltas.on_output, with_text=with_text)
        )
        try:
            await asyncio.shield(adding)
            while True:
                batch = await deltas.next_all()
                yield batch
                if batch[-1].finish_reason is not None:
                    return
        finally:
            # Whoever leaves while the request is still being added leaves it to be cancelled then.
            adding.add_done_callback(lambda task: self._cancel(request_id, task))

    def _counted(self, sink: Sink) -> Sink:
        """The sink, with what the engine counts of its requests' ends."""

        def on_output(event: Delta | DraftlineError) -> None:
            if isinstance(event, CapacityError):
                event.retry_after_s = self.retry_after_s()
            elif isinstance(event, Delta) and event.finish_reason is not None:
                self._rate.finished(time.monotonic())
            sink(event)

        return on_output

    @property
    def capacity(self) -> int:
        """Most requests that run or wait."""
        return self.config.max_num_seqs + self.config.max_queued_requests

    def retry_after_s(self) -> int:
        """Seconds until a full queue has probably room."""
        stats, rate = self.stats(), self._rate.per_second(time.monotonic())
        return retry_after_s(stats.num_waiting, stats.num_running, rate)

    def _cancel(self, request_id: str, adding: asyncio.Task[None]) -> None:
        if not adding.cancelled() and adding.exception() is None:
            self._thread.cancel(request_id)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        request_id: str | None = None,
    ) -> RequestOutput:
        """The whole answer of one prompt; as `stream`."""
        answer = OutputCollector(request_id or f"request-{uuid.uuid4().hex}")
        ids = await off_loop(self._factory.prompt_ids, prompt)
        answer.prompt_ids = tuple(ids.tolist())
        async for delta in self.stream(
            list(answer.prompt_ids),
            params,
            options,
            request_id=answer.request_id,
        ):
            answer.on_output(delta)
        return answer.wait()


def _of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(
            "params", f"must be one for all prompts or one for each of {count}, not {len(params)}"
        )
    return params


@contextmanager
def _cancelling(thread: EngineThread) -> Iterator[list[str]]:
    """Requests named in the list are cancelled if the block ends by an error."""
    running: list[str] = []
    try:
        yield running
    except BaseException:
        for request_id in running:
            thread.cancel(request_id)
        raise
