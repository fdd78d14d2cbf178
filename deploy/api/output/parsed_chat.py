"""Answers to chats whose text is read: calls of tools and reasoning stand apart from content."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from openai.types.chat import ChatCompletionMessage

from ..generation.job import Piece
from ..tools.events import (
    CallArguments,
    CallStart,
    Content,
    Event,
    ParsedAnswer,
    ParsedCall,
    Parser,
    Reasoning,
    parse_whole,
)
from .completions import ChatFormat, Extra, Heading
from .json_parts import BytesOf


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
                case CallArguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
                case Content() | Reasoning():
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
