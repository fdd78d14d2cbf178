"""The engine as the HTTP API sees it: in this process, or the base of remote ones."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol, cast

from ...cluster.loop_calls import spare_collector
from ...core.request.output import Delta
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ...core.request.stop import AnswerText
from ...models.text.tokenizer import load_tokenizer
from ..engine.stats import EngineStats
from .text_codec import TextCodec

if TYPE_CHECKING:
    from ..engine.async_engine import AsyncEngine


class EngineClient(Protocol):
    """One served model. Valid between `start` and `close`."""

    async def start(self) -> None:
        """Get ready to serve. Raises what stops the server: `ConfigError`, `CheckpointError`."""
        ...

    async def close(self) -> None:
        """Release everything; may be called again."""
        ...

    @property
    def codec(self) -> TextCodec:
        """The model's tokenizer."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and answer."""
        ...

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        *,
        request_id: str,
    ) -> AsyncGenerator[Delta, None]:
        """One request's deltas; closing the generator cancels the request.

        Raises `RequestError`, `CapacityError`, `StageError`, `StageLost`, `EngineClosed`.
        """
        ...

    async def stats(self) -> list[EngineStats]:
        """Counters and gauges of every engine replica."""
        ...

    async def is_healthy(self) -> bool:
        """Whether a request sent now would be served."""
        ...


class LocalEngineClient:
    """An engine in this process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def start(self) -> None:
        """Load the model and its drafters."""
        await self._engine.start()
        self._codec = TextCodec(self._engine.tokenizer)

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()

    @property
    def codec(self) -> TextCodec:
        """The model's tokenizer."""
        return self._codec

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and answer."""
        return self._engine.max_model_len

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        *,
        request_id: str,
    ) -> AsyncGenerator[Delta, None]:
        """One request's deltas; closing the generator cancels the request."""
        deltas = self._engine.stream(prompt, params, options, request_id=request_id)
        return cast("AsyncGenerator[Delta, None]", deltas)

    async def stats(self) -> list[EngineStats]:
        """The engine's counters and gauges."""
        return [self._engine.stats()]

    async def is_healthy(self) -> bool:
        """Whether the engine serves."""
        return self._engine.is_healthy()


class RemoteEngineClient(ABC):
    """An engine in other processes. Token ids go there and come back; text is made here.

    Only deltas of requests with stop texts come with text, which the engine cuts.
    """

    _codec: TextCodec
    _max_model_len: int

    @property
    def codec(self) -> TextCodec:
        """The model's tokenizer."""
        return self._codec

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and answer."""
        return self._max_model_len

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        *,
        request_id: str,
    ) -> AsyncGenerator[Delta, None]:
        """One request's deltas; closing the generator cancels the request.

        Raises `RequestError`, `CapacityError`, `StageError`, `StageLost`, `EngineFailed`,
        `EngineClosed`, `ReaderTooSlow`.
        """
        texts: AnswerText | None = None
        batches = self._batches(prompt, params, options, request_id)
        async with aclosing(batches):
            async for deltas in batches:
                # Made when the engine has found that the prompt's ids have texts.
                texts = texts or self._codec.answer_text(prompt, params)
                for delta in deltas:
                    yield texts.completed(delta)

    @abstractmethod
    def _batches(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        request_id: str,
    ) -> AsyncGenerator[Sequence[Delta], None]:
        """A request's deltas as they come, to the last one; closing it cancels the request."""
        ...

    async def _load_tokenizer(self, model: str) -> None:
        """Read the tokenizer of a folder or hub id. Raises `CheckpointError`."""
        self._codec = TextCodec(await asyncio.to_thread(load_tokenizer, model))
        spare_collector()
