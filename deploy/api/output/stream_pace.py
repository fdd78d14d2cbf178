"""Deltas at a fixed pace, so that packets do not reveal what was drafted (docs/operations.md).

Speculative decoding commits several tokens a step where drafts were right. An observer of encrypted
packets sees how many, and can infer what the drafters knew (arXiv 2411.01076). A pace fixes the
number of tokens of an event, its time, or both.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from ....core.request.output import Delta, TokenLogProb, VerifiedTree
from ....models.text.tokenizer import Detokenizer
from ...settings.settings import ServerConfig

# With so many tokens held, no more are taken from the engine until some are sent.
MAX_HELD_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The pace of a stream; at least one of the two is set.

    tokens   of each delta but the last, exactly; None: as many as there are
    seconds  between deltas, sent at multiples of it on the event loop's clock; None: at once
    """

    tokens: int | None
    seconds: float | None

    @classmethod
    def of(cls, config: ServerConfig) -> Pace | None:
        """The pace of a server's settings; None: deltas are sent as they come."""
        tokens, milliseconds = config.stream_interval_tokens, config.stream_interval_ms
        if tokens is None and milliseconds is None:
            return None
        return cls(tokens=tokens, seconds=None if milliseconds is None else milliseconds / 1000)

    def paced(
        self, deltas: AsyncGenerator[Delta, None], text: Detokenizer
    ) -> AsyncGenerator[Delta, None]:
        """The same answer at this pace. `text` is new and follows the prompt of `deltas`.

        Closing it closes `deltas`. Raises what `deltas` raises, after what came before.
        """
        held = HeldDeltas(text)
        if self.seconds is None:
            assert self.tokens is not None, "a pace has tokens, seconds or both"
            return _by_tokens(deltas, held, self.tokens)
        return _by_time(deltas, held, self.tokens, self.seconds)


class HeldDeltas:
    """Received deltas of one answer, to be sent in other portions.

    `text` maps the tokens of a portion to their characters. The engine's text may lag
    behind if a stop text may have begun; then a portion's text comes with a later one.
    """

    def __init__(self, text: Detokenizer) -> None:
        self._stream = text
        self._num_chars = 0
        self._num_chars_left = 0
        self._ends: list[int] = []
        self._token_ids: list[int] = []
        self._sources: list[str] = []
        self._log_probs: list[TokenLogProb] = []
        self._prompt_log_probs: tuple[TokenLogProb | None, ...] | None = None
        self._trees: tuple[VerifiedTree, ...] = ()
        self._text = ""
        self._last: Delta | None = None

    @property
    def num_tokens(self) -> int:
        """How many tokens are held."""
        return len(self._token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether the answer's last delta is held."""
        return self._last is not None and self._last.finish_reason is not None

    def add(self, delta: Delta) -> None:
        """Hold one more delta."""
        for token_id in delta.token_ids:
            self._num_chars += len(self._stream.push(token_id))
            self._ends.append(self._num_chars)
        self._token_ids += delta.token_ids
        self._sources += delta.sources
        self._log_probs += delta.log_probs
        self._text += delta.text
        self._trees += delta.trees
        self._prompt_log_probs = self._prompt_log_probs or delta.prompt_log_probs
        self._last = delta

    def take(self, count: int) -> Delta:
        """The first `count` tokens that are held, with their text; never the answer's end."""
        assert self._last is not None, "nothing is held"
        num_chars = max(0, self._ends[count - 1] - self._num_chars_left)
        return Delta(request_id=self._last.request_id, **self._cut(count, num_chars))

    def take_rest(self) -> Delta:
        """Everything that is held; with it, the end of a finished answer."""
        assert self._last is not None, "nothing is held"
        last, self._last = self._last, None
        return last._replace(**self._cut(self.num_tokens, len(self._text)))

    def _cut(self, count: int, num_chars: int) -> dict[str, Any]:
        text = self._text[:num_chars]
        parts = {
            "token_ids": tuple(self._token_ids[:count]),
            "sources": tuple(self._sources[:count]),
            "log_probs": tuple(self._log_probs[:count]),
            "prompt_log_probs": self._prompt_log_probs,
            "text": text,
            "trees": self._trees,
        }
        for values in (self._ends, self._token_ids, self._sources, self._log_probs):
            del values[:count]
        self._text = self._text[num_chars:]
        self._num_chars_left += len(text)
        self._prompt_log_probs = None
        self._trees = ()
        return parts


async def _by_tokens(
    deltas: AsyncGenerator[Delta, None], held: HeldDeltas, count: int
) -> AsyncGenerator[Delta, None]:
    """Deltas of `count` tokens each, as soon as there are so many, and the rest last."""
    async with aclosing(deltas):
        async for delta in deltas:
            held.add(delta)
            # A last portion that is full carries the end itself.
            while held.num_tokens >= count + held.is_finished:
                yield held.take(count)
            if held.is_finished:
                yield held.take_rest()


async def _by_time(
    deltas: AsyncGenerator[Delta, None], held: HeldDeltas, count: int | None, seconds: float
) -> AsyncGenerator[Delta, None]:
    """What came since the last beat, or `count` tokens of it; at the end, the rest.

    Raises what `deltas` raises, once what came before has left.
    """
    arrived, has_room = asyncio.Event(), asyncio.Event()
    has_room.set()
    reading = asyncio.create_task(_read(deltas, held, arrived, has_room))
    try:
        while not (reading.done() and held.num_tokens == 0 and not held.is_finished):
            await arrived.wait()
            arrived.clear()
            if held.num_tokens or held.is_finished:
                await _next_beat(seconds)
                is_over = held.is_finished or reading.done()
                if count is None or is_over:
                    yield held.take_rest()
                elif held.num_tokens >= count:
                    yield held.take(count)
                has_room.set()
            if reading.done() or (count is not None and held.num_tokens >= count):
                arrived.set()
        reading.result()
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await deltas.aclose()


async def _read(
    deltas: AsyncGenerator[Delta, None],
    held: HeldDeltas,
    arrived: asyncio.Event,
    has_room: asyncio.Event,
) -> None:
    try:
        async for delta in deltas:
            held.add(delta)
            arrived.set()
            if held.num_tokens > MAX_HELD_TOKENS:
                has_room.clear()
                await has_room.wait()
    finally:
        arrived.set()


async def _next_beat(seconds: float) -> None:
    now = asyncio.get_running_loop().time()
    await asyncio.sleep((math.floor(now / seconds) + 1) * seconds - now)
