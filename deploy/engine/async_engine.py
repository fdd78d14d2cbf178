"""`AsyncEngine`: one engine with its thread, and streams of deltas on the caller's event loop."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from ...cluster.config import EngineConfig
from ...cluster.drafting.hub import AnyDrafter
from ...cluster.engine.assembly import Assembly, MakePipeline, ModelPlan, plan_model
from ...cluster.engine.engine_thread import REAL_TIME, EngineThread, EngineTime, Health
from ...cluster.engine.request_factory import Prompt, RequestFactory
from ...cluster.loop_calls import off_loop
from ...core.errors import CapacityError, DraftlineError, RequestError, shortened
from ...core.progress import Progress, unseen
from ...core.request.output import Delta, OutputCollector, RequestOutput
from ...core.request.request import Request, Sink
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ...core.request.stop import StopRule
from ...core.verify.rules import COUPLED
from ...models.text.grammar import GrammarConstraint
from .delta_queue import MAX_UNREAD_BYTES, DeltaQueue
from .placement import Placement, ensure_ray, stages_have_gpu
from .shadow import Shadow, ShadowCounts
from .stats import EngineStats
from .usage_log import UsageLog

if TYPE_CHECKING:
    from ...actors.kept_actors import SupervisorClient


# Checking so many ids takes well under a millisecond, as long as passing the work to a thread.
LIGHT_TOKENS = 2_000


class AsyncEngine:
    """An engine for servers. Requests may come from any thread and any event loop.

    `start` before all else; `close` ends what still runs.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        engine_id: str = "0",
        supervisor: SupervisorClient | None = None,
        pipelines: Callable[[MakePipeline], MakePipeline] | None = None,
        drafters: Callable[[Sequence[AnyDrafter]], Sequence[AnyDrafter]] | None = None,
        engine_time: EngineTime = REAL_TIME,
        on_failure: Callable[[str], object] = lambda _reason: None,
        max_unread_bytes: int | None = None,
        usage_log: str | None = None,
        progress: Progress = unseen,
    ) -> None:
        """Settings that are not in `config`.

        supervisor        of stages and drafters on Ray; without one they end with this process
        pipelines         takes the function that makes the pipeline of `config` and returns the one
                          that is used
        drafters          takes the drafters of `config` and returns those that are used
        engine_time       clocks of the engine; default: the machine's
        on_failure        called once, from any thread, with the reason when the engine cannot go on
        max_unread_bytes  most bytes that wait for the reader of a stream; more ends the request;
                          None: 8 MiB
        usage_log         file or redis:// URL for a record of each request that ends
        progress          shows the loading of weights in this process
        """
        self.config = config
        self.engine_id = engine_id
        ensure_ray(config)
        self._plan: ModelPlan = plan_model(config, has_gpu=stages_have_gpu(config))
        self._placement = Placement(config, supervisor, progress)
        make_pipeline = self._placement.make_pipeline
        self._make_pipeline: MakePipeline = (
            make_pipeline if pipelines is None else pipelines(make_pipeline)
        )
        self._replace_drafters = drafters
        self._time = engine_time
        self._factory: RequestFactory = self._plan.request_factory()
        self._thread = EngineThread(
            self._build,
            recovery_timeout_s=config.recovery_timeout_s,
            engine_time=engine_time,
            on_failure=on_failure,
        )
        self._assembly: Assembly | None = None
        self._usage = None if usage_log is None else UsageLog(usage_log, config.name)
        self._max_unread_bytes = max_unread_bytes or MAX_UNREAD_BYTES
        self._rate = FinishRate()
        self._shadow = (
            None
            if not config.shadow_rate
            else Shadow(
                config.shadow_rate,
                self.enqueue,
                lambda: not self.stats().num_waiting,
                is_float32=self._plan.specs[0].dtype == "float32",
            )
        )

    async def start(self) -> None:
        """Load stages and drafters. Raises `ConfigError`, `CheckpointError` or `StoreError`."""
        await asyncio.to_thread(self.load)

    async def close(self) -> None:
        """End all requests and free everything; a second call does nothing."""
        await asyncio.to_thread(self.free)

    def load(self) -> None:
        """`start` for callers without an event loop; blocks."""
        try:
            self._thread.start()
        except BaseException:
            self._placement.close()
            raise

    def free(self) -> None:
        """`close` for callers without an event loop; blocks."""
        if self._shadow is not None:
            self._shadow.close()
        self._thread.close()
        if self._usage is not None:
            self._usage.close()
        self._factory.grammars.close()
        self._placement.close()

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
        """Queue a request between two steps; does not wait for the step.

        `sink` gets its deltas, and the error that ends it, in any thread. `with_text`: as of
        `RequestFactory.build`. Raises `RequestError`, `EngineClosed`, `EngineFailed`.
        """
        self._check(params, options)
        # A grammar may take seconds, in a process of its own.
        preparing = self._factory.constraint(params)
        constraint = None if preparing is None else await asyncio.wrap_future(preparing)
        watched = None if self._shadow is None else self._shadow.watch(params, options, sink)
        own = sink if watched is None else watched.on_output
        parts = (request_id, prompt, params, self._counted(own), options, constraint)
        if is_light(prompt, params, options.answered):
            request, stop = self._request(*parts, with_text=with_text)
        else:
            request, stop = await off_loop(self._request, *parts, with_text=with_text)
        if watched is not None:
            watched.request = request
        self._thread.enqueue(request, stop)

    def enqueue(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        sink: Sink,
        options: RequestOptions,
    ) -> tuple[int, ...]:
        """`add` for callers without an event loop; the token ids of the prompt.

        Blocks while a grammar is prepared. Raises as `add`; `sink` gets what is found wrong later,
        such as `CapacityError`.
        """
        self._check(params, options)
        request, stop = self._request(request_id, prompt, params, sink, options)
        self._thread.enqueue(request, stop)
        return tuple(request.prompt_ids.tolist())

    def take_enqueued(self) -> None:
        """Wait until every enqueued request is queued, or its sink has the error; blocks.

        Raises `EngineFailed`, `EngineClosed`.
        """
        self._thread.take_enqueued()

    def cancel(self, request_id: str) -> None:
        """Cancel a request before the next step; an unknown id is ignored."""
        self._thread.cancel(request_id)

    def after_step(self, function: Callable[[], object]) -> None:
        """For sinks: run `function` after all sinks were called for the step; elsewhere at once."""
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
        """As `stream`, but all waiting deltas at once."""
        request_id = request_id or f"request-{uuid.uuid4().hex}"
        params, options = params or SamplingParams(), options or RequestOptions()
        deltas = DeltaQueue(
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
            # A reader that leaves while the request is being added: it is cancelled then.
            adding.add_done_callback(lambda task: self._cancel(request_id, task))

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

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, tokens."""
        return self._plan.max_model_len

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        return self._factory.tokenizer

    def is_healthy(self) -> bool:
        """Whether requests can be served now."""
        return self._thread.is_healthy

    def health(self) -> Health:
        """What the engine is doing (`cluster/engine/engine_thread.py`)."""
        return self._thread.health

    def stats(self) -> EngineStats:
        """A snapshot; read without waiting for the step that runs."""
        assert self._assembly is not None, "the engine is not started"
        scheduler = self._assembly.scheduler
        core = self._assembly.core
        return EngineStats(
            engine_id=self.engine_id,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_usage=scheduler.kv_usage,
            num_steps=core.num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_not_finite=core.num_not_finite,
            num_recoveries=self._thread.num_recoveries,
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
            wasted_by_source=dict(core.ended.wasted_by_source),
            by_tenant={name: replace(sums) for name, sums in core.ended.by_tenant.items()},
            usage_dropped=0 if self._usage is None else self._usage.num_dropped,
            tree_chunks=replace(core.tree_chunk_counts),
            shadow=ShadowCounts() if self._shadow is None else replace(self._shadow.counts),
            step_times=core.deadline.times,
            drafters=self._assembly.hub.stats(),
            stage_memory=tuple(self._assembly.pipeline.memory),
        )

    @property
    def capacity(self) -> int:
        """Most requests that run or wait."""
        return self.config.max_num_seqs + self.config.max_queued_requests

    def retry_after_s(self) -> int:
        """Estimated seconds until a full queue has room."""
        stats, rate = self.stats(), self._rate.per_second(time.monotonic())
        return retry_after_s(stats.num_waiting, stats.num_running, rate)

    async def _build(self) -> Assembly:
        drafters: Sequence[AnyDrafter] = await self._placement.make_drafters()
        if self._replace_drafters is not None:
            drafters = self._replace_drafters(drafters)
        self._assembly = Assembly(self._plan, self._make_pipeline, drafters, self._time)
        if self._usage is not None:
            self._assembly.core.ended.on_end = self._usage.note
        return self._assembly

    def _check(self, params: SamplingParams, options: RequestOptions) -> None:
        """Raise `RequestError` for parameters that this engine's settings exclude."""
        if self.config.acceptance != COUPLED and params.structured_output is not None:
            raise RequestError(
                "structured_output",
                f"needs acceptance: coupled; this engine has {self.config.acceptance}",
            )
        known = [drafter.source for drafter in self.config.drafters]
        for name in options.drafters or ():
            if name not in known:
                names = ", ".join(known) or "none"
                raise RequestError(
                    "speculative.drafters",
                    f"{shortened(name)} is no drafter of this engine; known: {names}",
                )

    def _request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        sink: Sink,
        options: RequestOptions,
        constraint: GrammarConstraint | None = None,
        *,
        with_text: bool = True,
    ) -> tuple[Request, StopRule]:
        """A request that fits this engine's model. Raises `RequestError`."""
        return self._factory.build(
            request_id,
            prompt,
            params,
            sink,
            options,
            constraint=constraint,
            # Unknown before the start.
            num_kv_slots=None if self._assembly is None else self._assembly.scheduler.num_slots,
            with_text=with_text,
        )

    def _counted(self, sink: Sink) -> Sink:
        """The sink, with counting of the request's end."""

        def on_output(event: Delta | DraftlineError) -> None:
            if isinstance(event, CapacityError):
                event.retry_after_s = self.retry_after_s()
            elif isinstance(event, Delta) and event.finish_reason is not None:
                self._rate.finished(time.monotonic())
            sink(event)

        return on_output

    def _cancel(self, request_id: str, adding: asyncio.Task[None]) -> None:
        if not adding.cancelled() and adding.exception() is None:
            self._thread.cancel(request_id)


def is_light(prompt: Prompt, params: SamplingParams, answered: Sequence[int] = ()) -> bool:
    """Whether a request is prepared so quickly that the event loop may do it."""
    listed = (
        params.allowed_token_ids, params.banned_token_ids, params.logit_bias, params.bad_words,
        params.stop_token_ids,
    )  # fmt: skip
    if isinstance(prompt, str) or any(listed):
        return False
    return len(prompt) + len(answered) <= LIGHT_TOKENS


# Shorter than this, a full queue is asked again and again; longer, clients give up.
MIN_RETRY_S = 1
MAX_RETRY_S = 60
# Before any request has ended: what runs takes long.
UNKNOWN_RETRY_S = 5
# Requests that the rate is measured over.
WINDOW = 32


class FinishRate:
    """How many requests end in a second, over the last ones. Times are seconds of one clock."""

    def __init__(self, window: int = WINDOW) -> None:
        self._ends: deque[float] = deque(maxlen=window)

    def finished(self, now: float) -> None:
        """A request has ended."""
        self._ends.append(now)

    def per_second(self, now: float) -> float:
        """The rate from the oldest end that is known until now; 0.0 before two have ended."""
        if len(self._ends) < 2 or now <= self._ends[0]:
            return 0.0
        return (len(self._ends) - 1) / (now - self._ends[0])


def retry_after_s(num_waiting: int, num_running: int, finished_per_s: float) -> int:
    """Whole seconds until as many requests as wait now have probably left the queue.

    A place is free at once where nothing waits or runs. Between `MIN_RETRY_S` and `MAX_RETRY_S`.
    """
    if num_waiting + num_running == 0:
        return MIN_RETRY_S
    if finished_per_s <= 0:
        return UNKNOWN_RETRY_S
    seconds = min(max(num_waiting, 1) / finished_per_s, MAX_RETRY_S)
    return max(math.ceil(seconds), MIN_RETRY_S)
