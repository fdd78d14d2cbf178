"""Where an answer ends: at a token, at a text, or at its longest length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .output import FinishReason
from .sampling_params import SamplingParams


class TextStream(Protocol):
    """Turns tokens into text one by one."""

    def push(self, token_id: int) -> str:
        """Text that this token makes final; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left at the end, with replacement characters for incomplete ones."""
        ...


def stop_token_ids(params: SamplingParams, eos_token_ids: Sequence[int]) -> frozenset[int]:
    """Tokens that end an answer."""
    eos = () if params.ignore_eos else eos_token_ids
    return frozenset((*params.stop_token_ids, *eos))


class Advance(NamedTuple):
    """Offered tokens that belong to the answer, the text they make final, and why it ends."""

    num_tokens: int
    text: str
    finish_reason: FinishReason | None


class StopRule:
    """Follows one answer and says at which exact token it ends.

    A stop token belongs to the answer's tokens but not to its text. A stop text ends the answer at
    the token that completes it and is cut from the text; text that may become the start of a stop
    text is held back until that is decided. Before the answer's `min_tokens` nothing ends it but
    its length: the target may not choose a stop token then (`core/token_rules.py`), and a stop text
    is plain text.
    """

    __slots__ = (
        "_held", "_max_tokens", "_min_tokens", "_num_tokens", "_stop", "_stop_ids", "_stream",
    )  # fmt: skip

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        max_tokens: int,
        stream: TextStream,
    ) -> None:
        self._stop_ids = stop_token_ids(params, eos_token_ids)
        self._min_tokens = params.min_tokens
        self._stop = params.stop
        self._max_tokens = max_tokens
        self._stream = stream
        self._num_tokens = 0
        self._held = ""

    @property
    def num_tokens_left(self) -> int:
        """Tokens that the answer may still take."""
        return self._max_tokens - self._num_tokens

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end the answer."""
        return tuple(self._stop_ids)

    def advance(self, token_ids: Sequence[int]) -> Advance:
        """Offer tokens in order; those after the end are not taken."""
        if not self._may_end(token_ids):
            self._num_tokens += len(token_ids)
            return Advance(len(token_ids), "".join(map(self._stream.push, token_ids)), None)
        text = ""
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            stopped = token_id in self._stop_ids
            if not stopped:
                self._held += self._stream.push(token_id)
            cut = self._find_stop() if self._stop else None
            ended = stopped or cut is not None or self._num_tokens == self._max_tokens
            if ended:
                reason: FinishReason = "stop" if stopped or cut is not None else "length"
                return Advance(index + 1, text + self._last_text(cut), reason)
            text += self._release()
        return Advance(len(token_ids), text, None)

    def _may_end(self, token_ids: Sequence[int]) -> bool:
        """False where no stop text is looked for and none of these tokens is the last."""
        is_long = self._num_tokens + len(token_ids) >= self._max_tokens
        return bool(self._stop) or is_long or not self._stop_ids.isdisjoint(token_ids)

    def _last_text(self, cut: int | None) -> str:
        if cut is None:
            self._held += self._stream.flush()
            cut = self._find_stop()
        return self._held if cut is None else self._held[:cut]

    def _find_stop(self) -> int | None:
        """Where the earliest stop text begins in the text that is held back."""
        if self._num_tokens <= self._min_tokens:
            return None
        starts = [start for text in self._stop if (start := self._held.find(text)) >= 0]
        return min(starts, default=None)

    def _release(self) -> str:
        """Give out the held text but for a tail that a stop text might begin with."""
        if not self._stop or self._num_tokens <= self._min_tokens:
            released, self._held = self._held, ""
            return released
        keep = max((_overlap(self._held, text) for text in self._stop), default=0)
        split = len(self._held) - keep
        released, self._held = self._held[:split], self._held[split:]
        return released


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
