"""Answers to completions and chats in the shapes of the OpenAI API, as JSON.

`metrics.speculative_decoding` has vLLM's names and `by_source`; `draftline` (only on request) names
the source of every token.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.responses import Response

from ....cluster.loop_calls import off_loop
from ....core.request.output import RequestMetrics, TokenLogProb
from ....core.verify.rules import LOSSY
from ....models.text.tokenizer import Detokenizer, TokenBytes
from ..tools.events import (
    CallArgumentsDelta,
    CallStart,
    Content,
    Event,
    ParsedAnswer,
    ParsedCall,
    Parser,
    ReasoningDelta,
    parse_whole,
)
from .job import CompletionOutput, Piece

# A part of a body, as JSON's values and `LazyList`s.
Fields = dict[str, Any]
BytesOf = Callable[[int], bytes]
# So many values are written in about a millisecond.
INLINE_VALUES = 2_000


class LazyList:
    """A long list in a body: `make` of each of the values, called when it is written.

    Between two of these calls other threads may run.
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

    def add(self, tokens: Sequence[TokenLogProb | None], text: str, *, is_last: bool) -> Fields:
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

    def _entries(self, tokens: Sequence[TokenLogProb | None], places: Sequence[int]) -> Fields:
        ids = [self._prompt_ids[0] if token is None else token.token_id for token in tokens]
        return {
            "tokens": [_text(self._bytes_of(token_id)) for token_id in ids],
            "token_logprobs": [None if token is None else token.log_prob for token in tokens],
            "top_logprobs": LazyList(partial(_top, self._bytes_of), tokens),
            "text_offset": list(places),
        }


def is_continuation(byte: int) -> bool:
    """Whether a byte of UTF-8 continues a character."""
    return byte & 0xC0 == 0x80


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


@dataclass(frozen=True, slots=True)
class Heading:
    """What every body of one response repeats; `created` is in seconds since 1970."""

    response_id: str
    created: int
    model: str

    def body(self, kind: str, choices: Sequence[Fields], use: Fields | None, extra: Fields) -> str:
        """A body as JSON; `kind` is the API's name for it."""
        return write_json(
            {
                "id": self.response_id,
                "object": kind,
                "created": self.created,
                "model": self.model,
                "choices": choices,
                "usage": use,
                **extra,
            }
        )


class CompletionFormat:
    """`/v1/completions`. `bytes_of` gives a token's bytes."""

    def __init__(
        self, heading: Heading, bytes_of: TokenBytes, *, skip_special_tokens: bool = True
    ) -> None:
        """skip_special_tokens: whether answers leave the text of special tokens out."""
        self.heading = heading
        self._bytes_of = bytes_of
        self._skips = skip_special_tokens
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def body(self, answers: Sequence[CompletionOutput], num_choices: int, extra: Fields) -> str:
        """The whole answer; `num_choices` answers stand for one prompt."""
        choices = [self._choice(index, answer.whole()) for index, answer in enumerate(answers)]
        return self.heading.body("text_completion", choices, usage(answers, num_choices), extra)

    def chunk(self, index: int, piece: Piece, extra: Fields) -> str:
        """The next part of a stream: a piece of choice `index`."""
        choices = [self._choice(index, piece)]
        return self.heading.body("text_completion", choices, usage_so_far(piece), extra)

    def last_chunk(
        self, answers: Sequence[CompletionOutput], num_choices: int, extra: Fields
    ) -> str:
        """The usage chunk that ends a stream; it has no choices."""
        return self.heading.body("text_completion", [], usage(answers, num_choices), extra)

    def _choice(self, index: int, piece: Piece) -> Fields:
        logprobs = None
        if piece.log_probs is not None:
            entries = self._logprobs.get(index) or self._new_logprobs(index, piece)
            is_last = piece.finish_reason is not None
            logprobs = entries.add(piece.log_probs, piece.text, is_last=is_last)
        choice = {
            "index": index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            **_further_fields(piece),
        }
        if piece.is_first and piece.token_ids is not None:
            choice["prompt_token_ids"] = list(piece.prompt_ids)
        if piece.prompt_log_probs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(piece.prompt_log_probs, self._bytes_of)
        return choice

    def _new_logprobs(self, index: int, first: Piece) -> CompletionLogprobs:
        entries = self._logprobs[index] = CompletionLogprobs(
            self._bytes_of, first.prompt_ids, first.echo, skip_special_tokens=self._skips
        )
        return entries


class ChatFormat:
    """`/v1/chat/completions`. `bytes_of` gives a token's bytes.

    Reasoning has two names, `reasoning_content` and vLLM's newer `reasoning`; both are sent.
    """

    def __init__(
        self,
        heading: Heading,
        bytes_of: BytesOf,
        new_parser: Callable[[], Parser] | None = None,
        *,
        include_reasoning: bool = True,
    ) -> None:
        """How answers are read.

        new_parser         finds calls of tools and reasoning; None: all text is content
        include_reasoning  False leaves the reasoning out
        """
        self.heading = heading
        self._bytes_of = bytes_of
        self._new_parser = new_parser
        self._include_reasoning = include_reasoning
        self._parsers: dict[int, Parser] = {}
        self._calling: set[int] = set()

    def body(self, answers: Sequence[CompletionOutput], num_choices: int, extra: Fields) -> str:
        """The whole answer; `num_choices` answers stand for one prompt."""
        pieces = [answer.whole() for answer in answers]
        choices = [self._whole_choice(index, piece) for index, piece in enumerate(pieces)]
        extra = extra | self._prompt_ids(pieces[0])
        if pieces[0].prompt_log_probs is not None:
            of_prompt = prompt_logprobs(pieces[0].prompt_log_probs, self._bytes_of)
            extra = extra | {"prompt_logprobs": of_prompt}
        return self.heading.body("chat.completion", choices, usage(answers, num_choices), extra)

    def chunk(self, index: int, piece: Piece, extra: Fields) -> str:
        """The next part of a stream, the first one with the role; empty where the text is not
        decided yet."""
        delta: Fields = {"content": piece.text}
        if self._new_parser is not None:
            delta = self._delta(self._events(index, piece, self._new_parser))
        if piece.is_first:
            delta = {"role": "assistant", **(delta or {"content": ""})}
        if not (delta or extra or piece.finish_reason or piece.log_probs or piece.token_ids):
            return ""
        choice = self._choice(index, piece, "delta", delta, calls=index in self._calling)
        extra = extra | self._prompt_ids(piece)
        return self.heading.body("chat.completion.chunk", [choice], usage_so_far(piece), extra)

    def last_chunk(
        self, answers: Sequence[CompletionOutput], num_choices: int, extra: Fields
    ) -> str:
        """The usage chunk that ends a stream; it has no choices."""
        return self.heading.body("chat.completion.chunk", [], usage(answers, num_choices), extra)

    def _whole_choice(self, index: int, piece: Piece) -> Fields:
        if self._new_parser is None:
            answer = ParsedAnswer(content=piece.text)
        else:
            answer = parse_whole(self._new_parser(), piece.text)
        says_else = bool(answer.calls or answer.reasoning)
        message: Fields = {
            "role": "assistant",
            "content": None if says_else and not answer.content else answer.content,
            "refusal": None,
            **self._reasoning(answer),
        }
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        return self._choice(index, piece, "message", message, calls=bool(answer.calls))

    def _choice(self, index: int, piece: Piece, name: str, value: Fields, *, calls: bool) -> Fields:
        """A choice whose `message` or `delta`, by `name`, is `value`."""
        logprobs = None
        if piece.log_probs is not None:
            tokens = [token for token in piece.log_probs if token is not None]
            entries = LazyList(partial(chat_logprob, self._bytes_of), tokens)
            logprobs = {"content": entries, "refusal": None}
        is_call = calls and piece.finish_reason == "stop"
        return {
            "index": index,
            name: value,
            "logprobs": logprobs,
            "finish_reason": "tool_calls" if is_call else piece.finish_reason,
            **_further_fields(piece),
        }

    def _events(self, index: int, piece: Piece, new_parser: Callable[[], Parser]) -> list[Event]:
        parser = self._parsers.get(index) or self._parsers.setdefault(index, new_parser())
        events = parser.push(piece.text)
        if piece.finish_reason is not None:
            events += parser.finish()
        if any(isinstance(event, CallStart) for event in events):
            self._calling.add(index)
        return events

    def _delta(self, events: Iterable[Event]) -> Fields:
        """The fields of a delta; fragments of one call are put together."""
        answer = ParsedAnswer()
        calls: dict[int, Fields] = {}
        for event in events:
            match event:
                case CallStart(index, call_id, name):
                    calls[index] = {"index": index, **_call(ParsedCall(call_id, name))}
                case CallArgumentsDelta(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
                case Content() | ReasoningDelta():
                    answer.add([event])
        fields = self._reasoning(answer)
        if answer.content:
            fields["content"] = answer.content
        return fields | ({"tool_calls": list(calls.values())} if calls else {})

    def _reasoning(self, answer: ParsedAnswer) -> Fields:
        if not (answer.reasoning and self._include_reasoning):
            return {}
        return {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}

    def _prompt_ids(self, piece: Piece) -> Fields:
        """All choices of a chat answer one prompt, so it stands beside them."""
        if piece.token_ids is None or not piece.is_first:
            return {}
        return {"prompt_token_ids": list(piece.prompt_ids)}


def _call(call: ParsedCall) -> Fields:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _further_fields(piece: Piece) -> Fields:
    """vLLM's fields of a choice: what stopped it, where something did; its tokens, if wanted."""
    fields: Fields = {}
    if piece.stop_reason is not None:
        fields["stop_reason"] = piece.stop_reason
    if piece.token_ids is not None:
        fields["token_ids"] = list(piece.token_ids)
    return fields


def usage_so_far(piece: Piece) -> Fields | None:
    """Tokens of the piece's prompt and of its answer up to its end, where they are wanted."""
    if piece.num_answered is None:
        return None
    return _usage(len(piece.prompt_ids), piece.num_answered)


def usage(answers: Sequence[CompletionOutput], num_choices: int) -> Fields:
    """Tokens of all prompts, each of which counts once, and of all answers."""
    prompts = _finished(answers[::num_choices])
    prompt = sum(request.prompt_tokens for request in prompts)
    generated = sum(request.generated_tokens for request in _finished(answers))
    cached = sum(request.cached_tokens for request in prompts)
    return {**_usage(prompt, generated), "prompt_tokens_details": {"cached_tokens": cached}}


def _usage(prompt: int, generated: int) -> Fields:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }


def metrics_block(answers: Sequence[CompletionOutput]) -> Fields:
    """`{"metrics": {"speculative_decoding": ...}}` over all answers of a response.

    `acceptance_histogram[n]` counts verification steps that accepted n drafted tokens.
    """
    metrics = _finished(answers)
    steps = sum(request.num_steps for request in metrics)
    drafted = sum(request.num_draft_tokens for request in metrics)
    accepted = sum(request.num_accepted_tokens for request in metrics)
    committed = sum(request.acceptance_length * request.num_steps for request in metrics)
    lengths = Counter(length for request in metrics for length in request.accepted_lengths)
    block = {
        "mean_acceptance_length": committed / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [lengths[n] for n in range(max(lengths, default=-1) + 1)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "acceptance": _acceptance(metrics),
        "by_source": _by_source(metrics),
    }
    return {"metrics": {"speculative_decoding": block}}


def _acceptance(metrics: Sequence[RequestMetrics]) -> str:
    """Names of the acceptance rules; a lossy one is marked."""
    rules = {request.acceptance for request in metrics}
    return ", ".join(f"{rule} (lossy)" if rule in LOSSY else rule for rule in sorted(rules))


def _by_source(metrics: Sequence[RequestMetrics]) -> dict[str, dict[str, int]]:
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for request in metrics:
        drafted.update(request.drafted_by_source)
        accepted.update(request.accepted_by_source)
    return {
        source: {"num_draft_tokens": drafted[source], "num_accepted_tokens": accepted[source]}
        for source in sorted(drafted | accepted)
    }


def _finished(answers: Sequence[CompletionOutput]) -> list[RequestMetrics]:
    return [answer.metrics for answer in answers if answer.metrics is not None]
