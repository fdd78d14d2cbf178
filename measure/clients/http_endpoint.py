"""A server with the OpenAI API as an endpoint, through the official client."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Self

import openai
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice

from ...core.errors import ConfigError, DraftlineError
from ..records import Arrival, Record, SpecCounts, from_block, from_timings
from .endpoint import Ask

TIMEOUT_S = 600.0
NO_KEY = "none"
# The replacement character, for incomplete UTF-8.
UNDECODED = "\ufffd"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's self-description; only a draftline server says more than its model's name."""

    model: str
    is_draftline: bool
    drafters: tuple[str, ...]
    is_chat: bool = False


class HttpEndpoint:
    """One server. A context manager.

    report       request each token's id and source from a draftline server; other servers only get
                 OpenAI's fields and `ignore_eos`
    http_client  an httpx client to use instead of a new one
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        report: bool = True,
        http_client: Any = None,
    ) -> None:
        url = base_url.rstrip("/")
        self.client = openai.AsyncOpenAI(
            base_url=url if url.endswith("/v1") else f"{url}/v1",
            api_key=api_key or NO_KEY,
            max_retries=0,
            timeout=TIMEOUT_S,
            http_client=http_client,
        )
        self.info = ServerInfo("", is_draftline=False, drafters=())
        self._report = report
        self.clock = time.perf_counter

    async def connect(self, model: str | None = None) -> Self:
        """Read the served models; `model` is required if there are several.

        Raises `ConfigError` naming the field.
        """
        try:
            cards = [card async for card in self.client.models.list()]
        except (openai.APIError, ValueError) as error:
            raise ConfigError(
                "base-url", f"{self.client.base_url} does not answer: {error}"
            ) from error
        card = next((card for card in cards if model in (None, card.id)), None)
        if card is None:
            known = ", ".join(card.id for card in cards)
            raise ConfigError("model", f"{model!r} is not served; known: {known or 'none'}")
        extra = card.model_extra or {}
        self.info = ServerInfo(
            card.id,
            card.owned_by == "draftline",
            tuple(extra.get("drafters") or ()),
            extra.get("is_chat") is True,
        )
        return self

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def answer(self, ask: Ask) -> Record:
        """Stream the answer. Raises `DraftlineError` with the server's message."""
        answer = _Answer()
        start = self.clock()
        with server_errors(ask.name):
            async for chunk in await self._stream(ask):
                answer.add(chunk, self.clock() - start)
        return answer.record(ask.name)

    async def first_token(self, ask: Ask, num_top: int) -> tuple[str, dict[str, float]]:
        """The first token's text, and the probabilities of the most probable ones.

        Texts that several tokens may share are left out. Raises `openai.APIError`.
        """
        prompt: Any = ask.prompt
        answer = await self.client.completions.create(
            model=self.info.model,
            prompt=prompt,
            max_tokens=1,
            temperature=ask.temperature,
            seed=ask.seed,
            logprobs=num_top,
            extra_body=self.extra_body(ask),
        )
        log_probs = answer.choices[0].logprobs
        if log_probs is None or not log_probs.tokens or not log_probs.top_logprobs:
            return "", {}
        # The list also has the chosen token if it is not among the likeliest.
        likeliest = sorted(log_probs.top_logprobs[0].items(), key=itemgetter(1))[-num_top:]
        return log_probs.tokens[0], {
            text: math.exp(log_prob) for text, log_prob in likeliest if UNDECODED not in text
        }

    async def _stream(self, ask: Ask) -> AsyncIterator[Completion | ChatCompletionChunk]:
        fields: dict[str, Any] = {
            "model": self.info.model,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "seed": ask.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": self.extra_body(ask),
        }
        if isinstance(ask.prompt, str):
            return await self.client.completions.create(prompt=ask.prompt, **fields)
        messages: Any = ask.prompt
        return await self.client.chat.completions.create(messages=messages, **fields)

    def extra_body(self, ask: Ask) -> dict[str, Any]:
        """The fields beyond OpenAI's."""
        body: dict[str, Any] = {"ignore_eos": True} if ask.ignore_eos else {}
        if not self.info.is_draftline:
            return body
        drafters = ask.setting.drafters
        speculative: dict[str, Any] = {"enabled": drafters != (), "report": self._report}
        if drafters:
            speculative["drafters"] = list(drafters)
        if ask.max_nodes is not None:
            speculative["max_tokens"] = ask.max_nodes
        return body | {"cache_salt": ask.salt, "speculative": speculative}


@contextmanager
def server_errors(name: str) -> Iterator[None]:
    """A context that turns the client's errors into a `DraftlineError` about `name`."""
    try:
        yield
    except openai.APIError as error:
        raise DraftlineError(f"prompt {name}: {error}") from error


class _Answer:
    """Collects the chunks of one stream."""

    def __init__(self) -> None:
        self._arrivals: list[Arrival] = []
        self._text = ""
        self._num_tokens: int | None = None
        self._num_prompt_tokens: int | None = None
        self._counts: SpecCounts | None = None

    def add(self, chunk: Completion | ChatCompletionChunk, seconds: float) -> None:
        extra = chunk.model_extra or {}
        if chunk.choices:
            choice = chunk.choices[0]
            if isinstance(choice, ChunkChoice):
                text = choice.delta.content or ""
                # A chat's first chunk only has the role.
                is_part = bool(text)
            else:
                text = choice.text or ""
                # A last chunk without text only has the finish reason.
                is_part = text or choice.finish_reason is None
            report = extra.get("draftline")
            if report is not None and report["token_ids"]:
                ids, sources = tuple(report["token_ids"]), tuple(report["sources"])
                self._arrivals.append(Arrival(seconds, ids, sources))
            elif is_part and report is None:
                self._arrivals.append(Arrival(seconds))
            self._text += text
        if chunk.usage is not None:
            self._num_tokens = chunk.usage.completion_tokens
            self._num_prompt_tokens = chunk.usage.prompt_tokens
        block = (extra.get("metrics") or {}).get("speculative_decoding")
        if block is not None:
            self._counts = from_block(block)
        elif "timings" in extra:
            self._counts = from_timings(extra["timings"])

    def record(self, name: str) -> Record:
        if not self._arrivals:
            raise DraftlineError(f"prompt {name}: the answer has no token")
        if self._num_tokens is None:
            raise DraftlineError(f"prompt {name}: the server sends no usage in its streams")
        return Record(
            prompt=name,
            text=self._text,
            num_tokens=self._num_tokens,
            arrivals=tuple(self._arrivals),
            counts=self._counts,
            num_prompt_tokens=self._num_prompt_tokens,
        )
