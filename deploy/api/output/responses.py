"""`/v1/responses`: an answer as one body, or as the events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from ....core.request.output import FinishReason, RequestMetrics, StopReason, TokenLogProb
from ..errors import ApiError
from ..schema.responses import ResponsesRequest
from ..tools.events import CallArgumentsDelta, CallStart, Content, Event, ReasoningDelta
from .completions import Fields as Data
from .completions import Heading, LazyList

Spell = Callable[[TokenLogProb], Data]
Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem:
    """Text for the user."""

    def __init__(self, spell: Spell) -> None:
        """`spell` gives the entry of a token's log-probability."""
        self.item_id = f"msg_{uuid.uuid4().hex}"
        self._spell = spell
        self._text = ""
        self._tokens: list[TokenLogProb] = []

    def add(self, text: str, tokens: Sequence[TokenLogProb]) -> Data:
        """The event of more text, with the log-probabilities of its tokens."""
        log_probs = [self._spell(token) for token in tokens]
        self._text += text
        self._tokens += tokens
        kind = "response.output_text.delta"
        return {"type": kind, "content_index": 0, "delta": text, "logprobs": log_probs}

    def body(self, status: Status) -> Data:
        """A `ResponseOutputMessage`; it is empty as long as it is not ended."""
        content = [] if status == "in_progress" else [self._part]
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def begin(self) -> list[Data]:
        """The one part of the message."""
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [{"type": "response.content_part.added", "content_index": 0, "part": part}]

    def end(self) -> list[Data]:
        """The whole text, and the whole part."""
        done = {"type": "response.output_text.done", "content_index": 0}
        part = {"type": "response.content_part.done", "content_index": 0, "part": self._part}
        return [{**done, "text": self._text, "logprobs": self._logprobs}, part]

    @property
    def _logprobs(self) -> LazyList:
        return LazyList(self._spell, list(self._tokens))

    @property
    def _part(self) -> Data:
        return {
            "type": "output_text",
            "text": self._text,
            "annotations": [],
            "logprobs": self._logprobs,
        }


class CallItem:
    """A call of a function."""

    def __init__(self, call_id: str, name: str) -> None:
        self.item_id = f"fc_{uuid.uuid4().hex}"
        self._call_id = call_id
        self._name = name
        self._arguments = ""

    def add(self, text: str) -> Data:
        """The event of more arguments."""
        self._arguments += text
        return {"type": "response.function_call_arguments.delta", "delta": text}

    def body(self, status: Status) -> Data:
        """A `ResponseFunctionToolCall`."""
        return {
            "id": self.item_id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self._arguments,
        }

    def begin(self) -> list[Data]:
        """Nothing: arguments come as they are."""
        return []

    def end(self) -> list[Data]:
        """The whole arguments."""
        kind = "response.function_call_arguments.done"
        return [{"type": kind, "arguments": self._arguments, "name": self._name}]


class ReasoningOutput:
    """The model's reasoning."""

    def __init__(self) -> None:
        self.item_id = f"rs_{uuid.uuid4().hex}"
        self._text = ""

    def add(self, text: str) -> Data:
        """The event of more reasoning."""
        self._text += text
        return {"type": "response.reasoning_text.delta", "content_index": 0, "delta": text}

    def body(self, status: Status) -> Data:
        """A `ResponseReasoningItem`."""
        content = [] if status == "in_progress" else [self._part]
        return {
            "id": self.item_id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": content,
        }

    def begin(self) -> list[Data]:
        """The one part of the reasoning."""
        part = {"type": "reasoning_text", "text": ""}
        return [{"type": "response.content_part.added", "content_index": 0, "part": part}]

    def end(self) -> list[Data]:
        """The whole text, and the whole part."""
        return [
            {"type": "response.reasoning_text.done", "content_index": 0, "text": self._text},
            {"type": "response.content_part.done", "content_index": 0, "part": self._part},
        ]

    @property
    def _part(self) -> Data:
        return {"type": "reasoning_text", "text": self._text}


# Events of an item lack what the stream adds: their number and the item's place.
OutputItem = MessageItem | CallItem | ReasoningOutput


class ResponseWriter:
    """One response while it is generated. Each call returns the events of what it adds."""

    def __init__(self, heading: Heading, request: ResponsesRequest, spell: Spell) -> None:
        """`spell` gives the entry of a token's log-probability."""
        self._spell = spell
        self._heading = heading
        self._request = request
        self._ended: list[Data] = []
        self._open: OutputItem | None = None
        self._number = 0
        self._state: Data = {"status": "in_progress"}

    def begin(self) -> list[Data]:
        """The events that a stream begins with."""
        return [
            self._event({"type": "response.created", "response": self.body()}),
            self._event({"type": "response.in_progress", "response": self.body()}),
        ]

    def add(self, events: Iterable[Event], tokens: Sequence[TokenLogProb] = ()) -> list[Data]:
        """The next parts of the answer. `tokens` stand beside the text that comes first."""
        added: list[Data] = []
        for event in events:
            match event:
                case Content(text):
                    if not isinstance(self._open, MessageItem):
                        self._start(MessageItem(self._spell), added)
                    assert isinstance(self._open, MessageItem)
                    added.append(self._placed(self._open.add(text, tokens)))
                    tokens = ()
                case ReasoningDelta(text):
                    if not isinstance(self._open, ReasoningOutput):
                        self._start(ReasoningOutput(), added)
                    assert isinstance(self._open, ReasoningOutput)
                    added.append(self._placed(self._open.add(text)))
                case CallStart(_, call_id, name):
                    self._start(CallItem(call_id, name), added)
                case CallArgumentsDelta(_, text):
                    assert isinstance(self._open, CallItem)
                    added.append(self._placed(self._open.add(text)))
        return added

    def finish(
        self, reason: FinishReason, _stop: StopReason, metrics: RequestMetrics | None
    ) -> list[Data]:
        """The answer has ended. A response holds at least one item."""
        added: list[Data] = []
        if self._open is None:
            self._start(MessageItem(self._spell), added)
        is_cut = reason == "length"
        self._end("incomplete" if is_cut else "completed", added)
        self._state = {"status": "incomplete" if is_cut else "completed", "usage": _usage(metrics)}
        if is_cut:
            self._state["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._state["completed_at"] = time.time()
        return added

    def last_event(self, extra: Data) -> Data:
        """The event that ends a stream."""
        kind = f"response.{self._state['status']}"
        return self._event({"type": kind, "response": self.body(extra)})

    def fail(self, error: ApiError) -> Data:
        """The event that ends a stream after an error."""
        details = {"code": "server_error", "message": error.message}
        self._state = {"status": "failed", "error": details}
        return self._event({"type": "response.failed", "response": self.body()})

    def body(self, extra: Data | None = None) -> Data:
        """The response so far, with fields beyond OpenAI's."""
        request, heading = self._request, self._heading
        return {
            "id": heading.response_id,
            "object": "response",
            "created_at": heading.created,
            "model": heading.model,
            "output": list(self._ended),
            **_echo(request),
            **self._state,
            **(extra or {}),
        }

    def _start(self, item: OutputItem, events: list[Data]) -> None:
        if self._open is not None:
            self._end("completed", events)
        self._open = item
        body = item.body("in_progress")
        events.append(
            self._event({"type": "response.output_item.added", **self._place, "item": body})
        )
        events += map(self._placed, item.begin())

    def _end(self, status: Status, events: list[Data]) -> None:
        assert self._open is not None
        events += map(self._placed, self._open.end())
        body = self._open.body(status)
        done = {"type": "response.output_item.done", **self._place, "item": body}
        events.append(self._event(done))
        self._ended.append(body)
        self._open = None

    @property
    def _place(self) -> Data:
        return {"output_index": len(self._ended)}

    def _placed(self, event: Data) -> Data:
        assert self._open is not None
        return self._event(event | self._place | {"item_id": self._open.item_id})

    def _event(self, event: Data) -> Data:
        number, self._number = self._number, self._number + 1
        return event | {"sequence_number": number}


def _echo(request: ResponsesRequest) -> Data:
    """Fields of the request that a response repeats."""
    temperature, top_p, choice = request.temperature, request.top_p, request.tool_choice
    return {
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata,
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 1.0 if temperature is None else temperature,
        "text": {"format": request.text.format.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in request.tools],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if top_p is None else top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _usage(metrics: RequestMetrics | None) -> Data | None:
    if metrics is None:
        return None
    return {
        "input_tokens": metrics.prompt_tokens,
        "input_tokens_details": {"cached_tokens": metrics.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": metrics.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": metrics.prompt_tokens + metrics.generated_tokens,
    }
