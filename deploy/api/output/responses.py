"""`/v1/responses`: what a model's answer becomes, as one body or as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from openai.types.responses import Response, ResponseUsage
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails

from ....core.request.output import FinishReason, RequestMetrics, TokenLogProb
from ..errors import ApiError
from ..schema.responses import ResponsesRequest
from ..tools.events import CallArguments, CallStart, Content, Event, Reasoning
from .completions import Heading
from .event_stream import write_json
from .response_items import (
    CallItem,
    Data,
    MessageItem,
    OutputItem,
    ReasoningItem,
    Spell,
    Status,
)


class ResponseWriter:
    """One response as it grows. Every call gives the events of what it adds."""

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
                case Reasoning(text):
                    if not isinstance(self._open, ReasoningItem):
                        self._start(ReasoningItem(), added)
                    assert isinstance(self._open, ReasoningItem)
                    added.append(self._placed(self._open.add(text)))
                case CallStart(_, call_id, name):
                    self._start(CallItem(call_id, name), added)
                case CallArguments(_, text):
                    assert isinstance(self._open, CallItem)
                    added.append(self._placed(self._open.add(text)))
        return added

    def finish(self, reason: FinishReason, metrics: Sequence[RequestMetrics]) -> list[Data]:
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
        """The event that ends a stream where something went wrong behind its first event."""
        details = {"code": "server_error", "message": error.message}
        self._state = {"status": "failed", "error": details}
        return self._event({"type": "response.failed", "response": self.body()})

    def body(self, extra: Data | None = None) -> Data:
        """The response as it stands, with fields beyond OpenAI's."""
        request, heading = self._request, self._heading
        response = Response.model_construct(
            id=heading.response_id,
            object="response",
            created_at=heading.created,
            model=heading.model,
            output=list(self._ended),
            **(_echo(request) | self._state),
            **(extra or {}),
        )
        return response.model_dump(exclude_unset=True, warnings=False)

    def _start(self, item: OutputItem, told: list[Data]) -> None:
        if self._open is not None:
            self._end("completed", told)
        self._open = item
        body = item.body("in_progress")
        told.append(
            self._event({"type": "response.output_item.added", **self._place, "item": body})
        )
        told += map(self._placed, item.begin())

    def _end(self, status: Status, told: list[Data]) -> None:
        assert self._open is not None
        told += map(self._placed, self._open.end())
        body = self._open.body(status)
        told.append(self._event({"type": "response.output_item.done", **self._place, "item": body}))
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


def framed(event: Data) -> str:
    """An event as server-sent events spell it, with its name."""
    return f"event: {event['type']}\ndata: {write_json(event)}\n\n"


def _echo(request: ResponsesRequest) -> Data:
    """What the request asked for, as responses repeat it."""
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


def _usage(metrics: Sequence[RequestMetrics]) -> ResponseUsage:
    prompt = sum(request.prompt_tokens for request in metrics)
    generated = sum(request.generated_tokens for request in metrics)
    cached = sum(request.cached_tokens for request in metrics)
    return ResponseUsage(
        input_tokens=prompt,
        input_tokens_details=InputTokensDetails(cached_tokens=cached, cache_write_tokens=0),
        output_tokens=generated,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
        total_tokens=prompt + generated,
    )
