"""The engine as Python sees it: `Engine` for scripts, `AsyncEngine` for servers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Self

from transformers import PreTrainedTokenizerBase

from ...cluster.config import EngineConfig
from ...cluster.engine.assembly import Assembly, MakePipeline, ModelPlan, plan_model
from ...cluster.engine.engine_thread import EngineThread, Health
from ...cluster.engine.request_factory import Prompt, RequestFactory
from ...cluster.loop_calls import off_loop
from ...core.errors import CapacityError, DraftlineError, RequestError, shortened
from ...core.request.output import Delta, OutputCollector, RequestOutput
from ...core.request.request import Request, Sink
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ...core.request.stop import StopRule
from ...core.verify.rules import COUPLED
from ...models.text.grammar import GrammarConstraint
from .delta_queue import MAX_UNREAD_BYTES, DeltaQueue
from .placement import Placement, stages_have_gpu
from .stats import EngineStats, FinishRate, retry_after_s

if TYPE_CHECKING:
    from ...actors.kept_actors import KeeperClient

# To look at so many ids takes well under a millisecond, as long as handing the work over.
LIGHT_TOKENS = 2_000


class _Replica:
    """One engine with its thread: what `Engine` and `AsyncEngine` share."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        engine_id: str = "0",
        keeper: KeeperClient | None = None,
        pipelines: Callable[[MakePipeline], MakePipeline] | None = None,
        on_failure: Callable[[str], object] = lambda _reason: None,
        max_unread_bytes: int | None = None,
    ) -> None:
        """What is not said by `config`.

        keeper            of stages and drafters on Ray; without one they end with this process
        pipelines         takes what makes the pipeline of `config`, gives what makes the one used
        on_failure        called once, from any thread, with the reason when the engine cannot go on
        max_unread_bytes  what may wait for the reader of a stream; more ends the request. None:
                          8 MiB
        """
        self.config = config
        self.engine_id = engine_id
        self._plan: ModelPlan = plan_model(config, has_gpu=stages_have_gpu(config))
        self._placement = Placement(config, keeper)
        make_pipeline = self._placement.make_pipeline
        self._make_pipeline: MakePipeline = (
            make_pipeline if pipelines is None else pipelines(make_pipeline)
        )
        self._factory: RequestFactory = self._plan.request_factory()
        self._thread = EngineThread(
            self._build, recovery_timeout_s=config.recovery_timeout_s, on_failure=on_failure
        )
        self._assembly: Assembly | None = None
        self._max_unread_bytes = max_unread_bytes or MAX_UNREAD_BYTES
        self._rate = FinishRate()

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
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
            wasted_by_source=dict(core.wasted_by_source),
            drafters=self._assembly.hub.stats(),
        )

    async def _build(self) -> Assembly:
        links = await self._placement.make_links()
        self._assembly = Assembly(self._plan, self._make_pipeline, links)
        return self._assembly

    def _start(self) -> None:
        try:
            self._thread.start()
        except BaseException:
            self._placement.close()
            raise

    def _stop(self) -> None:
        self._thread.close()
        self._factory.grammars.close()
        self._placement.close()

    def _add(  # noqa: PLR0917 - the parts of a request
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        sink: Sink,
        options: RequestOptions,
        constraint: GrammarConstraint | None,
    ) -> tuple[int, ...]:
        """Queue a request; its prompt's token ids. Raises `RequestError`, `CapacityError`."""
        request, stop = self._prepare(request_id, prompt, params, sink, options, constraint)
        self._thread.add(request, stop)
        return tuple(request.prompt_ids.tolist())

    def _constraint(self, params: SamplingParams) -> Future[GrammarConstraint] | None:
        """Begin to prepare the form of an answer. Raises `RequestError`."""
        if self.config.acceptance != COUPLED and params.structured_output is not None:
            raise RequestError(
                "structured_output",
                f"needs acceptance: coupled; this engine has {self.config.acceptance}",
            )
        return self._factory.constraint(params)

    def _prepare(  # noqa: PLR0913, PLR0917 - the parts of a request
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        sink: Sink,
        options: RequestOptions,
        constraint: GrammarConstraint | None,
        *,
        with_text: bool = True,
    ) -> tuple[Request, StopRule]:
        """A request that this engine can run. Raises `RequestError`."""
        self._check_drafters(options)
        return self._factory.build(
            request_id,
            prompt,
            params,
            sink,
            options,
            constraint=constraint,
            num_kv_slots=self._num_kv_slots,
            with_text=with_text,
        )

    @property
    def _num_kv_slots(self) -> int | None:
        """Tokens whose KV the engine can hold; None before it has started."""
        return None if self._assembly is None else self._assembly.scheduler.num_slots

    def _check_drafters(self, options: RequestOptions) -> None:
        known = [drafter.source for drafter in self.config.drafters]
        for name in options.drafters or ():
            if name not in known:
                names = ", ".join(known) or "none"
                raise RequestError(
                    "speculative.drafters",
                    f"{shortened(name)} is no drafter of this engine; known: {names}",
                )


class Engine(_Replica):
    """An engine for scripts: blocking calls, whole answers. A context manager.

    Raises `ConfigError`, `CheckpointError` or `StoreError` when it cannot start.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._start()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> list[RequestOutput]:
        """Answers of all prompts, in order; they run together.

        `RequestOptions(speculative=False)` decodes plainly; the answers are the same. Raises
        `RequestError` if a prompt does not fit, `CapacityError` if there are more than the queue
        holds, `StageLost`, `EngineClosed`.
        """
        if isinstance(prompts, str):
            # It would be taken for a list of its letters.
            raise RequestError("prompts", "must be a list of prompts; write [prompt]")
        params, options = params or SamplingParams(), options or RequestOptions()
        answers = []
        with _cancelling(self._thread) as running:
            for prompt in prompts:
                answer = OutputCollector(f"request-{uuid.uuid4().hex}")
                preparing = self._constraint(params)
                answer.prompt_ids = self._add(
                    answer.request_id,
                    prompt,
                    params,
                    answer.on_output,
                    options,
                    None if preparing is None else preparing.result(),
                )
                running.append(answer.request_id)
                answers.append(answer)
            return [answer.wait() for answer in answers]

    def close(self) -> None:
        """End all requests and free everything; a second call does nothing."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncEngine(_Replica):
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
        parts = (request_id, prompt, params, self._counted(sink), options, constraint)
        if _is_light(prompt, params):
            request, stop = self._prepare(*parts, with_text=with_text)
        else:
            request, stop = await off_loop(self._prepare, *parts, with_text=with_text)
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


def _is_light(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether a request takes so little time to prepare that a loop may do it."""
    listed = (
        params.allowed_token_ids, params.banned_token_ids, params.logit_bias, params.bad_words,
        params.stop_token_ids,
    )  # fmt: skip
    return not (isinstance(prompt, str) or len(prompt) > LIGHT_TOKENS or any(listed))


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
