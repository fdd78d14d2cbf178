"""An endpoint over an engine that runs in simulated time."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from ...core.errors import DraftlineError
from ...core.request.output import Delta
from ...core.request.request import Sink
from ...core.request.sampling_params import RequestOptions, SamplingParams
from .engine_endpoint import EngineEndpoint, StreamingEngine


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
