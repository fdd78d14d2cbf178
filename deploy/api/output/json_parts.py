"""Log-probabilities in the shapes of the two endpoints, made where a body is written."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from openai.types.completion_choice import Logprobs

from ....core.request.output import TokenLogProb
from ....models.text.token_bytes import TokenBytes
from ....models.text.tokenizer import TextStream
from .event_stream import LazyList

BytesOf = Callable[[int], bytes]


class CompletionLogprobs:
    """The `logprobs` of one completion, in as many parts as its text comes in.

    A token's `text_offset` is the place in the client's text where the token begins, characters;
    of the tokens that spell one character together, all begin where it does. A token comes with the
    part that brings all text before it, so that no stop text which is cut later moves its place.
    """

    def __init__(
        self,
        bytes_of: TokenBytes,
        prompt_ids: Sequence[int],
        echo: str | None,
        *,
        skip_special_tokens: bool,
    ) -> None:
        """`echo`: the prompt's text, if the text and the tokens begin with it."""
        self._bytes_of = bytes_of
        self._prompt_ids = prompt_ids
        self._echo = echo
        self._text = TextStream(bytes_of, prompt_ids, skip_special_tokens=skip_special_tokens)
        # Characters that came, and those that the tokens so far have written.
        self._num_chars = 0
        self._num_written = 0
        self._tokens: list[TokenLogProb | None] = []
        self._places: list[int] = []

    def add(self, tokens: Sequence[TokenLogProb | None], text: str, *, is_last: bool) -> Logprobs:
        """The entries that are decided with a part of the text and the tokens that came with it.

        None stands for the first token of a prompt that is echoed.
        """
        if self._echo is not None:
            self._add_echo(tokens[: len(self._prompt_ids)], self._echo)
            tokens, self._echo = tokens[len(self._prompt_ids) :], None
        self._tokens += tokens
        self._places += [self._place(token.token_id) for token in tokens if token is not None]
        self._num_chars += len(text)
        most = self._num_chars
        ready = len(self._places) if is_last else bisect_right(self._places, most)
        entries = self._entries(self._tokens[:ready], [min(p, most) for p in self._places[:ready]])
        del self._tokens[:ready], self._places[:ready]
        return entries

    def _add_echo(self, tokens: Sequence[TokenLogProb | None], echo: str) -> None:
        """Places of the prompt's tokens. Special ones that its text does not spell add nothing."""
        specials = self._bytes_of.special_tokens
        answer, self._text = self._text, TextStream(self._bytes_of, skip_special_tokens=False)
        for token_id in self._prompt_ids:
            spelling = specials.get(token_id, "")
            if spelling and not echo.startswith(spelling, self._num_written):
                self._places.append(self._num_written)
            else:
                self._places.append(min(self._place(token_id), len(echo)))
        self._tokens += tokens
        self._text, self._num_written = answer, len(echo)

    def _place(self, token_id: int) -> int:
        """Where a token begins, which is the next one."""
        data = self._bytes_of(token_id)
        if data and not is_continuation(data[0]):
            # Bytes before it that await others stay without them.
            self._num_written += len(self._text.flush())
        place = self._num_written
        self._num_written += len(self._text.push(token_id))
        return place

    def _entries(self, tokens: Sequence[TokenLogProb | None], places: Sequence[int]) -> Logprobs:
        ids = [self._prompt_ids[0] if token is None else token.token_id for token in tokens]
        return Logprobs.model_construct(
            tokens=[_text(self._bytes_of(token_id)) for token_id in ids],
            token_logprobs=[None if token is None else token.log_prob for token in tokens],
            top_logprobs=LazyList(partial(_top, self._bytes_of), tokens),
            text_offset=list(places),
        )


def is_continuation(byte: int) -> bool:
    """Whether a byte of UTF-8 goes on with a character."""
    return byte & 0xC0 == 0x80


def chat_logprobs(tokens: Sequence[TokenLogProb], bytes_of: BytesOf) -> LazyList:
    """One entry a token."""
    return LazyList(partial(chat_logprob, bytes_of), tokens)


def chat_logprob(bytes_of: BytesOf, token: TokenLogProb) -> dict[str, Any]:
    """The entry of one token."""
    top = [_spelled(token_id, log_prob, bytes_of) for token_id, log_prob in token.top]
    return _spelled(token.token_id, token.log_prob, bytes_of) | {"top_logprobs": top}


def prompt_logprobs(tokens: Sequence[TokenLogProb | None], bytes_of: BytesOf) -> LazyList:
    """vLLM's field of this name: by token id, the prompt's own token first."""

    def entry(token: TokenLogProb | None) -> dict[str, dict[str, Any]] | None:
        if token is None:
            return None
        pairs = {token.token_id: token.log_prob, **dict(token.top)}
        return {
            str(token_id): {"logprob": log_prob, "decoded_token": _text(bytes_of(token_id))}
            for token_id, log_prob in pairs.items()
        }

    return LazyList(entry, tokens)


def _top(bytes_of: BytesOf, token: TokenLogProb | None) -> dict[str, float] | None:
    """By text, the chosen token always among them."""
    if token is None:
        return None
    pairs = [*token.top, (token.token_id, token.log_prob)]
    return {_text(bytes_of(token_id)): log_prob for token_id, log_prob in pairs}


def _spelled(token_id: int, log_prob: float, bytes_of: BytesOf) -> dict[str, Any]:
    data = bytes_of(token_id)
    return {"token": _text(data), "bytes": list(data), "logprob": log_prob}


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
