"""An engine in this process as an endpoint, in real or in simulated time."""

from __future__ import annotations

import asyncio
import gc
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from ...core.errors import DraftlineError
from ...core.request.output import Delta, RequestMetrics
from ...core.request.request import Sink
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ...models.text.chat_template import ChatOptions, ChatTemplate
from ..records import Arrival, PromptInput, Record, from_metrics
from .endpoint import Ask


class StreamingEngine(Protocol):
    """The part of `AsyncEngine` that is measured."""

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Deltas of one answer as they are committed."""
        ...


@contextmanager
def collector_spared() -> Iterator[None]:
    """Exclude existing objects from garbage collection while engines are measured.

    Servers do so permanently (`spare_collector`).
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class EngineEndpoint:
    """Answers requests by one engine in this process.

    per_request  each request names its drafters; else the engine only has those of the setting, so
                 that no other drafter takes time
    tokenizer    for the chat template; None: prompts are texts only
    """

    def __init__(
        self,
        engine: StreamingEngine,
        *,
        per_request: bool,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self._engine = engine
        self._per_request = per_request
        self._tokenizer = tokenizer
        self.clock: Callable[[], float] = time.perf_counter

    async def answer(self, ask: Ask) -> Record:
        """Stream the answer. Raises `DraftlineError`."""
        arrivals, texts = [], []
        metrics: RequestMetrics | None = None
        prompt = ask.prompt
        if not isinstance(prompt, str):
            assert self._tokenizer is not None, "chats need a template"
            prompt = prompt_ids(self._tokenizer, prompt)
        start = self.clock()
        async with aclosing(self._timed_deltas(prompt, _params(ask), self._options(ask))) as deltas:
            async for came_at, delta in deltas:
                if delta.token_ids:
                    arrivals.append(Arrival(came_at - start, delta.token_ids, delta.sources))
                texts.append(delta.text)
                metrics = delta.metrics
        if metrics is None or not arrivals:
            raise DraftlineError(f"prompt {ask.name}: the answer has no token")
        return Record(
            prompt=ask.name,
            text="".join(texts),
            num_tokens=metrics.generated_tokens,
            arrivals=tuple(arrivals),
            counts=from_metrics(metrics),
            num_prompt_tokens=metrics.prompt_tokens,
        )

    async def first_token(self, ask: Ask, num_top: int) -> tuple[str, dict[str, float]]:
        """The first token's id, and the probabilities of the most probable ones' ids."""
        assert isinstance(ask.prompt, str)
        params = replace(_params(ask), max_tokens=1, logprobs=num_top)
        async with aclosing(self._engine.stream(ask.prompt, params, self._options(ask))) as deltas:
            drawn = [log_prob async for delta in deltas for log_prob in delta.log_probs]
        if not drawn:
            return "", {}
        return str(drawn[0].token_id), {
            str(token): math.exp(log_prob) for token, log_prob in drawn[0].top
        }

    async def _timed_deltas(
        self, prompt: str | Sequence[int], params: SamplingParams, options: RequestOptions
    ) -> AsyncGenerator[tuple[float, Delta], None]:
        """Deltas, and the clock's time of each."""
        async with aclosing(self._engine.stream(prompt, params, options)) as deltas:
            async for delta in deltas:
                yield self.clock(), delta

    def _options(self, ask: Ask) -> RequestOptions:
        drafters = ask.setting.drafters
        return RequestOptions(
            cache_salt=ask.salt,
            speculative=drafters != (),
            drafters=drafters if self._per_request else None,
            max_nodes=ask.max_nodes,
        )


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: PromptInput) -> list[int]:
    """The tokens of a prompt; chats go through the chat template.

    Raises `RequestError` if there is no template, or it refuses the chat.
    """
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    text = ChatTemplate(tokenizer).render(prompt, ChatOptions())
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _params(ask: Ask) -> SamplingParams:
    return SamplingParams(
        max_tokens=ask.max_tokens,
        temperature=ask.temperature,
        top_p=ask.top_p,
        seed=ask.seed,
        ignore_eos=ask.ignore_eos,
    )


class AddingEngine(StreamingEngine, Protocol):
    """The part of `AsyncEngine` that delivers deltas in its own thread."""

    async def add(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        sink: Sink,
    ) -> None:
        """Queue a request; `sink` gets its deltas, and the error that ends it."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request soon; an unknown id is ignored."""
        ...


class SimulatedEndpoint(EngineEndpoint):
    """Answers requests by an engine in simulated time. Each part's time is when the engine
    delivered it, not when the client read it.
    """

    def __init__(
        self,
        engine: AddingEngine,
        clock: Callable[[], float],
        *,
        per_request: bool,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        super().__init__(engine, per_request=per_request, tokenizer=tokenizer)
        self._adding = engine
        self.clock = clock

    async def _timed_deltas(
        self, prompt: str | Sequence[int], params: SamplingParams, options: RequestOptions
    ) -> AsyncGenerator[tuple[float, Delta], None]:
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[float, Delta | DraftlineError]] = asyncio.Queue()

        def tell(event: Delta | DraftlineError) -> None:
            loop.call_soon_threadsafe(events.put_nowait, (self.clock(), event))

        request_id = f"request-{uuid.uuid4().hex}"
        await self._adding.add(request_id, prompt, params, options, tell)
        try:
            while True:
                came_at, event = await events.get()
                if isinstance(event, DraftlineError):
                    raise event
                yield came_at, event
                if event.finish_reason is not None:
                    return
        finally:
            self._adding.cancel(request_id)
