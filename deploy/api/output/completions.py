"""Answers to completions and chats in the shapes of the OpenAI API, built from openai's own types.

`metrics.speculative_decoding` has vLLM's names and `by_source`; `draftline` (only on request) names
the source of every token. Bodies are built with `model_construct`: in a stream OpenAI itself sends
`finish_reason: null`, which its own completion type does not allow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

from openai import BaseModel
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.completion_usage import PromptTokensDetails

from ....core.request.output import RequestMetrics
from ....core.verify.rules import LOSSY
from ....models.text.token_bytes import TokenBytes
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
from .json_parts import (
    BytesOf,
    ChunkTemplate,
    CompletionLogprobs,
    chat_logprobs,
    prompt_logprobs,
    write_json,
)

# Fields beyond OpenAI's, such as `draftline`.
Extra = dict[str, Any]
LogprobsT = TypeVar("LogprobsT", ChoiceLogprobs, ChunkLogprobs)


@dataclass(frozen=True, slots=True)
class Heading:
    """What every body of one response repeats; `created` is in seconds since 1970."""

    response_id: str
    created: int
    model: str

    def body(self, kind: type[BaseModel], name: str, **fields: Any) -> str:
        """A body as JSON; the API calls its `kind` by `name`."""
        body = kind.model_construct(
            id=self.response_id, object=name, created=self.created, model=self.model, **fields
        )
        data = body.model_dump(exclude_unset=True, warnings=False)
        return write_json(data)


class AnswerFormat(Protocol):
    """One endpoint's spelling of answers; texts are JSON."""

    def body(self, answers: Sequence[CompletionOutput], num_choices: int, extra: Extra) -> str:
        """The whole answer; `num_choices` answers stand for one prompt."""
        ...

    def chunk(self, index: int, piece: Piece, extra: Extra) -> str:
        """An event of a stream: the next piece of choice `index`; empty if it has no text yet."""
        ...

    def last_chunk(
        self, answers: Sequence[CompletionOutput], num_choices: int, extra: Extra
    ) -> str:
        """The usage chunk that ends a stream; it has no choices."""
        ...


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

    def body(self, answers: Sequence[CompletionOutput], num_choices: int, extra: Extra) -> str:
        """The whole answer."""
        choices = [self._choice(index, answer.whole()) for index, answer in enumerate(answers)]
        return self._completion(choices, usage(answers, num_choices), extra)

    def chunk(self, index: int, piece: Piece, extra: Extra) -> str:
        """A part of a stream."""
        if piece.is_plain and not extra:
            return self._template.chunk(index, piece)
        return self._completion([self._choice(index, piece)], usage_so_far(piece), extra)

    @cached_property
    def _template(self) -> ChunkTemplate:
        return ChunkTemplate(
            lambda index, piece: self._completion([self._choice(index, piece)], None, {})
        )

    def last_chunk(
        self, answers: Sequence[CompletionOutput], num_choices: int, extra: Extra
    ) -> str:
        """The usage chunk that ends a stream."""
        return self._completion([], usage(answers, num_choices), extra)

    def _choice(self, index: int, piece: Piece) -> CompletionChoice:
        extra: Extra = further_fields(piece)
        if piece.is_first and piece.token_ids is not None:
            extra["prompt_token_ids"] = list(piece.prompt_ids)
        if piece.prompt_log_probs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(piece.prompt_log_probs, self._bytes_of)
        logprobs = None
        if piece.log_probs is not None:
            entries = self._logprobs.get(index) or self._new_logprobs(index, piece)
            is_last = piece.finish_reason is not None
            logprobs = entries.add(piece.log_probs, piece.text, is_last=is_last)
        return CompletionChoice.model_construct(
            index=index,
            text=piece.text,
            logprobs=logprobs,
            finish_reason=piece.finish_reason,
            **extra,
        )

    def _new_logprobs(self, index: int, first: Piece) -> CompletionLogprobs:
        entries = self._logprobs[index] = CompletionLogprobs(
            self._bytes_of, first.prompt_ids, first.echo, skip_special_tokens=self._skips
        )
        return entries

    def _completion(
        self, choices: list[CompletionChoice], use: CompletionUsage | None, extra: Extra
    ) -> str:
        return self.heading.body(Completion, "text_completion", choices=choices, usage=use, **extra)


class ChatFormat:
    """`/v1/chat/completions`. `bytes_of` gives a token's bytes."""

    def __init__(self, heading: Heading, bytes_of: BytesOf) -> None:
        self.heading = heading
        self._bytes_of = bytes_of

    def body(self, answers: Sequence[CompletionOutput], num_choices: int, extra: Extra) -> str:
        """The whole answer."""
        pieces = [answer.whole() for answer in answers]
        choices = [self._choice(index, piece) for index, piece in enumerate(pieces)]
        extra = extra | self._prompt_ids(pieces[0])
        if pieces[0].prompt_log_probs is not None:
            of_prompt = prompt_logprobs(pieces[0].prompt_log_probs, self._bytes_of)
            extra = extra | {"prompt_logprobs": of_prompt}
        use = usage(answers, num_choices)
        return self.heading.body(
            ChatCompletion, "chat.completion", choices=choices, usage=use, **extra
        )

    def _choice(self, index: int, piece: Piece) -> Choice:
        message, finish_reason = self._message(piece)
        return Choice.model_construct(
            index=index,
            message=message,
            logprobs=self._logprobs(piece, ChoiceLogprobs),
            finish_reason=finish_reason,
            **further_fields(piece),
        )

    def _message(self, piece: Piece) -> tuple[ChatCompletionMessage, str | None]:
        """A whole answer's message, and why it ended."""
        message = ChatCompletionMessage.model_construct(
            role="assistant", content=piece.text, refusal=None
        )
        return message, piece.finish_reason

    def chunk(self, index: int, piece: Piece, extra: Extra) -> str:
        """An event of a stream; the first one has the role."""
        if piece.is_plain and not extra:
            return self._template.chunk(index, piece)
        return self._full_chunk(index, piece, extra)

    @cached_property
    def _template(self) -> ChunkTemplate:
        return ChunkTemplate(lambda index, piece: self._full_chunk(index, piece, {}))

    def _full_chunk(self, index: int, piece: Piece, extra: Extra) -> str:
        role: dict[str, Any] = {"role": "assistant"} if piece.is_first else {}
        delta = {**role, "content": piece.text}
        return self._delta_chunk(index, delta, piece, piece.finish_reason, extra)

    def _delta_chunk(
        self,
        index: int,
        delta: dict[str, Any],
        piece: Piece,
        finish_reason: str | None,
        extra: Extra,
    ) -> str:
        choice = ChunkChoice.model_construct(
            index=index,
            delta=ChoiceDelta.model_construct(**delta),
            logprobs=self._logprobs(piece, ChunkLogprobs),
            finish_reason=finish_reason,
            **further_fields(piece),
        )
        return self._chunk([choice], usage_so_far(piece), extra | self._prompt_ids(piece))

    def last_chunk(
        self, answers: Sequence[CompletionOutput], num_choices: int, extra: Extra
    ) -> str:
        """The usage chunk that ends a stream."""
        return self._chunk([], usage(answers, num_choices), extra)

    def _prompt_ids(self, piece: Piece) -> Extra:
        """All choices of a chat answer one prompt, so it stands beside them."""
        if piece.token_ids is None or not piece.is_first:
            return {}
        return {"prompt_token_ids": list(piece.prompt_ids)}

    def _logprobs(self, piece: Piece, kind: type[LogprobsT]) -> LogprobsT | None:
        if piece.log_probs is None:
            return None
        tokens = [token for token in piece.log_probs if token is not None]
        content: Any = chat_logprobs(tokens, self._bytes_of)
        return kind.model_construct(content=content, refusal=None)

    def _chunk(self, choices: list[ChunkChoice], use: CompletionUsage | None, extra: Extra) -> str:
        return self.heading.body(
            ChatCompletionChunk, "chat.completion.chunk", choices=choices, usage=use, **extra
        )


def further_fields(piece: Piece) -> Extra:
    """vLLM's fields of a choice: what stopped it, where something did; its tokens, if wanted."""
    extra: Extra = {}
    if piece.stop_reason is not None:
        extra["stop_reason"] = piece.stop_reason
    if piece.token_ids is not None:
        extra["token_ids"] = list(piece.token_ids)
    return extra


def usage_so_far(piece: Piece) -> CompletionUsage | None:
    """Tokens of the piece's prompt and of its answer up to its end, where they are wanted."""
    if piece.num_answered is None:
        return None
    prompt = len(piece.prompt_ids)
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=piece.num_answered,
        total_tokens=prompt + piece.num_answered,
    )


def usage(answers: Sequence[CompletionOutput], num_choices: int) -> CompletionUsage:
    """Tokens of all prompts, each of which counts once, and of all answers."""
    prompts = _finished(answers[::num_choices])
    prompt = sum(request.prompt_tokens for request in prompts)
    generated = sum(request.generated_tokens for request in _finished(answers))
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(request.cached_tokens for request in prompts)
        ),
    )


def metrics_block(answers: Sequence[CompletionOutput]) -> Extra:
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


class ParsedChatFormat(ChatFormat):
    """`/v1/chat/completions` with `tool_calls` and reasoning.

    Reasoning has two names, `reasoning_content` and vLLM's newer `reasoning`; both are sent.
    """

    def __init__(
        self,
        heading: Heading,
        bytes_of: BytesOf,
        new_parser: Callable[[], Parser],
        *,
        include_reasoning: bool = True,
    ) -> None:
        """include_reasoning: False leaves the reasoning out."""
        super().__init__(heading, bytes_of)
        self._new_parser = new_parser
        self._include_reasoning = include_reasoning
        self._parsers: dict[int, Parser] = {}
        self._calling: set[int] = set()

    def chunk(self, index: int, piece: Piece, extra: Extra) -> str:
        """A part of a stream; empty where the text is not decided yet."""
        parser = self._parsers.get(index) or self._parsers.setdefault(index, self._new_parser())
        events = parser.push(piece.text)
        if piece.finish_reason is not None:
            events += parser.finish()
        if any(isinstance(event, CallStart) for event in events):
            self._calling.add(index)
        if piece.is_plain and not extra and piece.finish_reason is None:
            return self._plain_chunk(index, piece, events)
        delta = self._delta(events)
        if piece.is_first:
            delta = {"role": "assistant", **(delta or {"content": ""})}
        if not (delta or extra or piece.finish_reason or piece.log_probs or piece.token_ids):
            return ""
        finish = _finish_reason(piece, calls=index in self._calling)
        return self._delta_chunk(index, delta, piece, finish, extra)

    def _plain_chunk(self, index: int, piece: Piece, events: list[Event]) -> str:
        if not events:
            return ""
        texts = [event.text for event in events if isinstance(event, Content)]
        if len(texts) == len(events):
            return self._template.chunk(index, replace(piece, text="".join(texts)))
        delta = self._delta(events)
        return self._delta_chunk(index, delta, piece, None, {}) if delta else ""

    def _delta(self, events: Iterable[Event]) -> dict[str, Any]:
        """The fields of a delta; fragments of one call are put together."""
        answer = ParsedAnswer()
        calls: dict[int, dict[str, Any]] = {}
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

    def _message(self, piece: Piece) -> tuple[ChatCompletionMessage, str | None]:
        answer = parse_whole(self._new_parser(), piece.text)
        calls = [_call(call) for call in answer.calls]
        says_else = bool(calls or answer.reasoning)
        fields: dict[str, Any] = {
            "role": "assistant",
            "content": None if says_else and not answer.content else answer.content,
            "refusal": None,
            **self._reasoning(answer),
            **({"tool_calls": calls} if calls else {}),
        }
        return ChatCompletionMessage.model_construct(**fields), _finish_reason(
            piece, calls=bool(calls)
        )

    def _reasoning(self, answer: ParsedAnswer) -> dict[str, Any]:
        if not (answer.reasoning and self._include_reasoning):
            return {}
        return {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}


def _call(call: ParsedCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _finish_reason(piece: Piece, *, calls: bool) -> str | None:
    return "tool_calls" if calls and piece.finish_reason == "stop" else piece.finish_reason
