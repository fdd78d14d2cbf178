"""The engine as the HTTP API sees it, in this process or in others, and its model's tokenizer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ...cluster.loop_calls import off_loop, spare_collector
from ...core.errors import RequestError
from ...core.request.output import Delta
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ...core.request.stop import AnswerText
from ...models.text.chat_template import ChatOptions, ChatTemplate
from ...models.text.tokenizer import Detokenizer, TokenBytes, load_tokenizer
from ..engine.stats import EngineStats

if TYPE_CHECKING:
    from ..engine.async_engine import AsyncEngine

T = TypeVar("T")

# Above so many characters, tokens or messages, work takes milliseconds and must not hold up other
# streams.
INLINE_CHARS = 4_000
INLINE_TOKENS = 2_000
# The same for templates, which take microseconds a message.
INLINE_MESSAGES = 32
TEMPLATE_TIMEOUT_S = 10.0


class TextCodec:
    """A transformers tokenizer behind the API's routes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.bytes_of = TokenBytes(tokenizer)
        self.template = ChatTemplate(tokenizer)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The special tokens, which have no text unless it is asked for, by their spelling."""
        return {text: index for index, text in self.bytes_of.special_tokens.items()}

    async def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Token ids of `text`; `special` adds the model's own special tokens."""
        return (await self.encode_all([text], special=special))[0]

    async def encode_all(
        self, texts: Sequence[str], *, special: bool = True
    ) -> list[tuple[int, ...]]:
        """Token ids of each text."""
        is_short = sum(map(len, texts)) <= INLINE_CHARS

        def encode() -> list[tuple[int, ...]]:
            return [
                tuple(self.tokenizer.encode(text, add_special_tokens=special)) for text in texts
            ]

        return await _run(encode, is_short)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        """The text of a chat. Raises `RequestError` as `ChatTemplate.render` does."""
        if _is_short(messages, options):
            return self.template.render(messages, options)
        return await off_loop(self.template.render, messages, options, timeout_s=TEMPLATE_TIMEOUT_S)

    async def decode(self, token_ids: Sequence[int], field: str = "tokens") -> str:
        """Text of token ids, special tokens included. Raises `RequestError` for unknown ids."""

        def decode() -> str:
            self._spell(token_ids, field)
            return self.tokenizer.decode(list(token_ids))

        return await _run(decode, len(token_ids) <= INLINE_TOKENS)

    def answer_text(self, prompt: Sequence[int], params: SamplingParams) -> AnswerText:
        """Makes the text of an answer whose tokens come without."""
        return AnswerText(params, self.text_stream(prompt, params))

    def text_stream(self, prompt: Sequence[int], params: SamplingParams) -> Detokenizer:
        """Makes text of the tokens that follow a prompt."""
        skips = params.skip_special_tokens
        return Detokenizer(self.bytes_of, prompt, skip_special_tokens=skips)

    async def token_strs(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each token. Raises `RequestError` for unknown ids."""
        return await _run(lambda: self._spell(token_ids, "tokens"), len(token_ids) <= INLINE_TOKENS)

    def _spell(self, token_ids: Sequence[int], field: str) -> list[str]:
        tokens = self.tokenizer.convert_ids_to_tokens(list(token_ids))
        # Ids may have gaps: how many tokens there are does not say which.
        if None in tokens:
            unknown = token_ids[tokens.index(None)]
            raise RequestError(field, f"the vocabulary has no token of id {unknown}")
        return tokens


async def _run(work: Callable[[], T], is_short: bool) -> T:
    return work() if is_short else await off_loop(work)


def _is_short(messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> bool:
    """Whether the template takes well under a millisecond; a client's own one never counts so."""
    if len(messages) > INLINE_MESSAGES or options.template is not None:
        return False
    if options.tools or options.documents or options.variables:
        return False
    if any(not message.keys() <= {"role", "content", "name"} for message in messages):
        return False
    return sum(len(message["content"]) for message in messages) <= INLINE_CHARS


class EngineClient(ABC):
    """One served model. Valid between `start` and `close`.

    codec          the model's tokenizer
    max_model_len  most tokens of a request, prompt and answer
    """

    codec: TextCodec
    max_model_len: int

    @abstractmethod
    async def start(self) -> None:
        """Get ready to serve. Raises what stops the server: `ConfigError`, `CheckpointError`."""
        ...

    @abstractmethod
    async def close(self) -> None:
        """Release everything; may be called again."""
        ...

    @abstractmethod
    def stream(
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
        ...

    @abstractmethod
    async def stats(self) -> list[EngineStats]:
        """Counters and gauges of every engine replica."""
        ...

    @abstractmethod
    async def is_healthy(self) -> bool:
        """Whether a request sent now would be served."""
        ...


class LocalEngineClient(EngineClient):
    """An engine in this process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def start(self) -> None:
        """Load the model and its drafters."""
        await self._engine.start()
        self.codec = TextCodec(self._engine.tokenizer)
        self.max_model_len = self._engine.max_model_len

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()

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


class RemoteEngineClient(EngineClient):
    """An engine in other processes. Token ids go there and come back; text is made here.

    Only deltas of requests with stop texts come with text, which the engine cuts.
    """

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        *,
        request_id: str,
    ) -> AsyncGenerator[Delta, None]:
        """One request's deltas, with texts."""
        texts: AnswerText | None = None
        batches = self._batches(prompt, params, options, request_id)
        async with aclosing(batches):
            async for deltas in batches:
                # Made when the engine has found that the prompt's ids have texts.
                texts = texts or self.codec.answer_text(prompt, params)
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
        self.codec = TextCodec(await asyncio.to_thread(load_tokenizer, model))
        spare_collector()
