"""The items of a response's output: each begins, grows and ends by events of its own."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from ....core.request.output import TokenLogProb
from .event_stream import LazyList

Data = dict[str, Any]
Spell = Callable[[TokenLogProb], Data]
Status = Literal["in_progress", "completed", "incomplete"]


class OutputItem(Protocol):
    """One item; events lack what the stream adds: their number and the item's place."""

    item_id: str

    def body(self, status: Status) -> Data:
        """The item as it stands."""
        ...

    def begin(self) -> list[Data]:
        """Events behind the one that adds the item."""
        ...

    def end(self) -> list[Data]:
        """Events before the one that ends the item."""
        ...


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
        told = [self._spell(token) for token in tokens]
        self._text += text
        self._tokens += tokens
        kind = "response.output_text.delta"
        return {"type": kind, "content_index": 0, "delta": text, "logprobs": told}

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


class ReasoningItem:
    """What the model thought."""

    def __init__(self) -> None:
        self.item_id = f"rs_{uuid.uuid4().hex}"
        self._text = ""

    def add(self, text: str) -> Data:
        """The event of more thoughts."""
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
        """The one part of the thoughts."""
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
