"""What `/v1/responses` is given to answer: items, which become the messages of a chat.

A client may send back whatever a response held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from .request_models import StrictModel

MAX_ITEMS = 4096
Status = Literal["in_progress", "completed", "incomplete"]
# Of an item or a part that a client sends back; it asks for nothing.
Anything = list[Any]


class InputText(StrictModel):
    """A piece of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Anything | None = None
    logprobs: Anything | None = None

    @property
    def value(self) -> str:
        """The text itself."""
        return self.text


class RefusalPart(StrictModel):
    """A piece of an assistant's message that says no."""

    type: Literal["refusal"]
    refusal: str

    @property
    def value(self) -> str:
        """The text itself."""
        return self.refusal


class InputMessage(StrictModel):
    """A message, or one that a response held."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: str | list[Annotated[InputText | RefusalPart, Field(discriminator="type")]]
    id: str | None = None
    status: Status | None = None
    phase: str | None = None

    def for_chat(self) -> dict[str, Any]:
        """The message of a chat."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        parts = [{"type": "text", "text": part.value} for part in self.content]
        return {"role": self.role, "content": parts}


class FunctionCall(StrictModel):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None

    def for_chat(self) -> dict[str, Any]:
        """The call of an assistant's message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class FunctionCallOutput(StrictModel):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: Status | None = None
    name: str | None = None

    def for_chat(self) -> dict[str, Any]:
        """The message of a chat."""
        output = self.output
        text = output if isinstance(output, str) else "\n".join(part.text for part in output)
        return {"role": "tool", "tool_call_id": self.call_id, "content": text}


class ReasoningText(StrictModel):
    """A piece of what a model thought, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(StrictModel):
    """What a model thought before it answered."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(part.text for part in self.content or ())


def _kind(item: Any) -> str | None:
    """The type of an item; a message need not name it."""
    return item.get("type") or "message" if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="must be an item of type message, function_call, "
        "function_call_output or reasoning; nothing is kept that others could refer to",
    ),
]


def chat_messages(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """The messages of a chat. Calls and thoughts join the assistant's message beside them."""
    messages: list[dict[str, Any]] = []
    thought = ""
    for item in items:
        match item:
            case ReasoningItem():
                thought += item.text
                continue
            case FunctionCall():
                _calling(messages, thought)["tool_calls"].append(item.for_chat())
            case _:
                messages.append(item.for_chat())
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
            thought = ""
    return messages


def _calling(messages: list[dict[str, Any]], thought: str) -> dict[str, Any]:
    """The assistant's message that a call belongs to: the last one, or a new one."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or thought:
        last = {"role": "assistant", "content": None}
        messages.append(last)
    last.setdefault("tool_calls", [])
    return last
