"""`/v1/messages`: an answer as one message, or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ....core.request.output import FinishReason, RequestMetrics, StopReason, TokenLogProb
from ..errors import ApiError
from ..tools.events import CallArgumentsDelta, CallStart, Content, Event, ReasoningDelta
from .completions import Fields as Data
from .completions import Heading


class BlockKind(NamedTuple):
    """Names of a kind of blocks: its type, the field of its text, and both of an event of more."""

    type: str
    field: str
    delta: str
    delta_field: str


TEXT = BlockKind("text", "text", "text_delta", "text")
THINKING = BlockKind("thinking", "thinking", "thinking_delta", "thinking")
CALL = BlockKind("tool_use", "input", "input_json_delta", "partial_json")


class OutputBlock:
    """One block of a message, whose text grows."""

    def __init__(self, kind: BlockKind, **fields: Any) -> None:
        self.kind = kind
        self._fields = fields
        self._text = ""

    def begin(self) -> Data:
        """The block before its text."""
        empty: Any = {} if self.kind == CALL else ""
        return {"type": self.kind.type, **self._fields, self.kind.field: empty}

    def add(self, text: str) -> Data:
        """What an event of more text holds."""
        self._text += text
        return {"type": self.kind.delta, self.kind.delta_field: text}

    def body(self) -> Data:
        """The whole block. Arguments that the limit of tokens cut are left out."""
        whole: Any = _object(self._text) if self.kind == CALL else self._text
        return {"type": self.kind.type, **self._fields, self.kind.field: whole}


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class MessageWriter:
    """One message while it is generated. Each call returns the events of what it adds."""

    def __init__(self, heading: Heading, num_prompt_tokens: int) -> None:
        self._heading = heading
        self._blocks: list[Data] = []
        self._open: OutputBlock | None = None
        self._has_calls = False
        self._end: Data = {"stop_reason": None, "stop_sequence": None}
        self._usage: Data = {"input_tokens": num_prompt_tokens, "output_tokens": 0}

    def begin(self) -> list[Data]:
        """The event that a stream begins with."""
        return [{"type": "message_start", "message": self.body()}]

    def add(self, events: Iterable[Event], _tokens: Sequence[TokenLogProb] = ()) -> list[Data]:
        """The next parts of the answer."""
        added: list[Data] = []
        for event in events:
            match event:
                case Content(text):
                    self._write(TEXT, text, added)
                case ReasoningDelta(text):
                    # A signature would show that the text is this server's own; none is checked.
                    self._write(THINKING, text, added, signature="")
                case CallStart(_, call_id, name):
                    self._has_calls = True
                    self._start(OutputBlock(CALL, id=call_id, name=name), added)
                case CallArgumentsDelta(_, text):
                    self._write(CALL, text, added)
        return added

    def finish(
        self, reason: FinishReason, stop: StopReason, metrics: RequestMetrics | None
    ) -> list[Data]:
        """The answer has ended; `stop` is the stop text or token that ended it."""
        added: list[Data] = []
        self._stop(added)
        if reason == "length":
            self._end["stop_reason"] = "max_tokens"
        elif self._has_calls:
            self._end["stop_reason"] = "tool_use"
        elif isinstance(stop, str):
            self._end = {"stop_reason": "stop_sequence", "stop_sequence": stop}
        else:
            self._end["stop_reason"] = "end_turn"
        if metrics is not None:
            self._usage = {
                "input_tokens": metrics.prompt_tokens - metrics.cached_tokens,
                "cache_read_input_tokens": metrics.cached_tokens,
                "output_tokens": metrics.generated_tokens,
            }
        return [*added, {"type": "message_delta", "delta": self._end, "usage": self._usage}]

    def last_event(self, extra: Data) -> Data:
        """The event that ends a stream."""
        return {"type": "message_stop", **extra}

    def fail(self, error: ApiError) -> Data:
        """The event that ends a stream after an error."""
        return error.message_body

    def body(self, extra: Data | None = None) -> Data:
        """The message so far, with fields beyond Anthropic's."""
        return {
            "id": self._heading.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._heading.model,
            "content": list(self._blocks),
            **self._end,
            "usage": self._usage,
            **(extra or {}),
        }

    def _write(self, kind: BlockKind, text: str, events: list[Data], **fields: Any) -> None:
        if self._open is None or self._open.kind != kind:
            self._start(OutputBlock(kind, **fields), events)
        assert self._open is not None
        events.append(self._placed("content_block_delta", delta=self._open.add(text)))

    def _start(self, block: OutputBlock, events: list[Data]) -> None:
        self._stop(events)
        self._open = block
        events.append(self._placed("content_block_start", content_block=block.begin()))

    def _stop(self, events: list[Data]) -> None:
        if self._open is not None:
            events.append(self._placed("content_block_stop"))
            self._blocks.append(self._open.body())
            self._open = None

    def _placed(self, kind: str, **fields: Data) -> Data:
        return {"type": kind, "index": len(self._blocks), **fields}
