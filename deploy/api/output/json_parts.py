"""Parts of bodies: JSON written in slices, chunks of a template, log-probabilities."""

from __future__ import annotations

import json
import re
import uuid
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from openai.types.completion_choice import Logprobs
from starlette.responses import Response

from ....cluster.loop_calls import off_loop
from ....core.request.output import TokenLogProb
from ....models.text.token_bytes import TokenBytes
from ....models.text.tokenizer import Detokenizer
from .job import Piece

BytesOf = Callable[[int], bytes]
# So many values are written in about a millisecond.
INLINE_VALUES = 2_000
# No model has this name.
_MARK = uuid.uuid4().hex
_INDEX = uuid.uuid4().int


class LazyList:
    """A long list in a body: `make` of each of the values, called when it is written.

    No dataclass: pydantic would look into it.
    """

    __slots__ = ("_make", "_values")

    def __init__(self, make: Callable[[Any], Any], values: Sequence[Any]) -> None:
        self._make = make
        self._values = values

    def plain(self) -> list[_Part]:
        """The list that the encoder writes."""
        return [_Part(self._make, value) for value in self._values]


class _Part:
    __slots__ = ("_make", "_value")

    def __init__(self, make: Callable[[Any], Any], value: Any) -> None:
        self._make = make
        self._value = value

    def plain(self) -> Any:
        return self._make(self._value)


def write_json(value: Any) -> str:
    """Compact JSON of plain values and `LazyList`s."""
    return _ENCODER.encode(value)


def write_object(fields: Mapping[str, Any]) -> str:
    """Compact JSON of an object, whose own long lists are written in slices."""
    parts = [f"{write_json(name)}:{_write_field(value)}" for name, value in fields.items()]
    return f"{{{','.join(parts)}}}"


def _write_field(value: Any) -> str:
    if not isinstance(value, list | tuple) or not value:
        return write_json(value)
    starts = range(0, len(value), INLINE_VALUES)
    slices = [write_json(value[start : start + INLINE_VALUES])[1:-1] for start in starts]
    return f"[{','.join(slices)}]"


async def json_response(fields: Mapping[str, Any], num_values: int) -> Response:
    """A response of a JSON object with so many values in it."""
    if num_values <= INLINE_VALUES:
        content = write_object(fields).encode()
    else:
        content = await off_loop(lambda: write_object(fields).encode())
    return Response(content, media_type="application/json")


def _plain(value: Any) -> Any:
    if isinstance(value, LazyList | _Part):
        return value.plain()
    raise TypeError(f"{type(value).__name__} is not JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain)


_TEXT, _REASON = f"text-{_MARK}", f"reason-{_MARK}"


class ChunkTemplate:
    """Chunks of plain pieces, as one full way of making them makes them, at a hundredth of its
    time."""

    __slots__ = ("_parts",)

    def __init__(self, make: Callable[[int, Piece], str]) -> None:
        """`make` gives the JSON of the chunk of a piece of choice `index`."""
        piece: Any = Piece(
            text=_TEXT,
            finish_reason=_REASON,  # pyright: ignore[reportArgumentType] - stands for any
            is_first=False,
            echo=None,
            prompt_ids=(),
            log_probs=None,
            prompt_log_probs=None,
        )
        self._parts = re.split(f'("{_TEXT}"|"{_REASON}"|{_INDEX})', make(_INDEX, piece))

    def chunk(self, index: int, piece: Piece) -> str:
        """The chunk's JSON; `piece` must be plain and not the first of its answer."""
        values = {
            f'"{_TEXT}"': json.dumps(piece.text, ensure_ascii=False),
            f'"{_REASON}"': json.dumps(piece.finish_reason),
            str(_INDEX): str(index),
        }
        return "".join([values.get(part, part) for part in self._parts])


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
        self._text = Detokenizer(bytes_of, prompt_ids, skip_special_tokens=skip_special_tokens)
        # Characters that came, and those that the tokens so far have written.
        self._num_chars = 0
        self._num_written = 0
        self._tokens: list[TokenLogProb | None] = []
        self._places: list[int] = []

    def add(self, tokens: Sequence[TokenLogProb | None], text: str, *, is_last: bool) -> Logprobs:
        """The entries that become certain with a part of the text and its tokens.

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
        answer, self._text = self._text, Detokenizer(self._bytes_of, skip_special_tokens=False)
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
            # Incomplete bytes before it stay incomplete.
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
    """Whether a byte of UTF-8 continues a character."""
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
