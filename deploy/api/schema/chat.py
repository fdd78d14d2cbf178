"""Fields of a chat: messages with their parts and calls, tools, and options of its template.

A client may send back whatever a server returned: fields that ask for nothing are accepted with
null or their neutral value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from ....models.text.chat_template import CallArguments, ChatOptions
from ..errors import bad_request
from .request_models import StrictModel

MAX_TOOLS = 128
MAX_NAME_CHARS = 128

MODES = ("none", "auto", "required")
ToolName = Annotated[
    str, Field(pattern=r"^[a-zA-Z0-9_.-]+$", min_length=1, max_length=MAX_NAME_CHARS)
]


class FunctionDefinition(StrictModel):
    """A function. `parameters` is a JSON schema; without one it takes none.

    strict  accepted: a call that must be made always follows the schema
    """

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool; only functions."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        function.setdefault("parameters", {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


class FunctionName(StrictModel):
    """A function by its name."""

    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)]


class NamedTool(StrictModel):
    """`{"type": "function", "function": {"name": ...}}`: the one tool to call."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(StrictModel):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(StrictModel):
    """`{"type": "allowed_tools", "allowed_tools": ...}`."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind(choice: Any) -> str:
    """Which of its forms a choice has; errors name the field in that form."""
    if isinstance(choice, str):
        return "mode"
    kind = choice.get("type") if isinstance(choice, Mapping) else choice.type
    return "allowed" if kind == "allowed_tools" else "named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedToolsChoice, Tag("allowed")],
    Discriminator(_kind),
]


class ToolFields(StrictModel):
    """The fields of a request that are about tools."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _check_choice(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, Mapping) else None
        if value is None or value in MODES or kind in ("function", "allowed_tools"):
            return value
        raise ValueError(
            "must be 'none', 'auto', 'required', or {'type': 'function', 'function': {'name': ...}}"
        )


MAX_PARTS = 1024
MAX_SHOWN = 64
MAX_CALLS_PER_MESSAGE = 128

# Fields that servers add to an assistant's message, with their neutral value besides null.
NEUTRAL: dict[str, Any] = {"annotations": []}
_PART_KEYS = {"text": "text", "refusal": "refusal"}


class TextPart(StrictModel):
    """A piece of a message: text, or an assistant's refusal, which is text, too."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @property
    def value(self) -> str:
        """The text itself."""
        return self.text or self.refusal or ""


class CalledFunction(StrictModel):
    """The name of a tool, and its arguments as JSON."""

    name: str
    arguments: str = "{}"

    def for_template(self) -> dict[str, Any]:
        """Templates write the arguments as JSON themselves; what is no object stays a text."""
        text = self.arguments or "{}"
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            arguments = None
        is_object = isinstance(arguments, dict)
        return {
            "name": self.name,
            "arguments": CallArguments(arguments, text) if is_object else self.arguments,
        }


class ToolCall(StrictModel):
    """A call that an assistant's message made. `index` is what clients of streams leave in it."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates expect it."""
        call: dict[str, Any] = {"type": "function", "function": self.function.for_template()}
        return call if self.id is None else {"id": self.id, **call}


class ChatMessage(StrictModel):
    """One message of a chat.

    reasoning, reasoning_content  two names of what an assistant thought, given to the template
    tool_call_id                  the call that a tool's message answers
    function_call                 the one call of an assistant, as it was sent before `tool_calls`
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS_PER_MESSAGE)] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {
            key: item for key, item in value.items() if key not in NEUTRAL or item != NEUTRAL[key]
        }

    @field_validator("content", mode="before")
    @classmethod
    def _check_content(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, str | list):
            raise ValueError("must be a text or a list of parts")
        for index, part in enumerate(value if isinstance(value, list) else ()):
            _check_part(index, part)
        return value

    @model_validator(mode="after")
    def _check_role(self) -> ChatMessage:
        is_assistant = self.role == "assistant"
        if self.content is None and not is_assistant:
            raise ValueError(f"content is required for the role {self.role}")
        if (self.tool_calls or self.function_call) and not is_assistant:
            raise ValueError(f"tool_calls do not go with the role {self.role}")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"tool_call_id does not go with the role {self.role}")
        return self

    @property
    def text(self) -> str:
        """Its whole text; each part is a line."""
        if self.content is None:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.value for part in self.content)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls it made, in either spelling."""
        if self.tool_calls:
            return self.tool_calls
        return [] if self.function_call is None else [ToolCall(function=self.function_call)]

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it; what it does not have has no key."""
        role = "tool" if self.role == "function" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": [call.for_template() for call in self.calls] or None,
        }
        return message | {key: value for key, value in optional.items() if value is not None}


def _check_part(index: int, part: Any) -> None:
    """Raises `ValueError` that names a part by its place and kind."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in _PART_KEYS:
        shown = repr(kind[:MAX_SHOWN]) if isinstance(kind, str) else "no known type"
        raise ValueError(f"part {index} has {shown}; this model takes parts of type 'text' only")
    if not isinstance(part.get(_PART_KEYS[kind]), str):
        raise ValueError(f"part {index} needs a text in {_PART_KEYS[kind]!r}")


MAX_DOCUMENTS = 128
MAX_TEMPLATE_VARIABLES = 64


class TemplateFields(StrictModel):
    """vLLM's fields for chat templates.

    add_generation_prompt   open the assistant's answer; by default, unless the last message is to
                            be continued
    continue_final_message  leave the last message open: the answer continues it
    chat_template_kwargs    further variables of the template, such as `enable_thinking`
    documents               texts to answer from, for templates that know them
    chat_template           a template of the client's own, where the server allows it
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: (
        Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None
    ) = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)] | None = None
    chat_template: str | None = None

    def chat_options(self, tools: Sequence[Tool], *, trust_template: bool) -> ChatOptions:
        """How to render the chat. Raises `ApiError` 400 naming the field.

        trust_template  whether a client may bring its own template
        """
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request(
                "continue_final_message", "does not go with add_generation_prompt: true"
            )
        if self.chat_template is not None and not trust_template:
            raise bad_request(
                "chat_template",
                "this server uses its model's own template; its operator can allow others with "
                "--trust-request-chat-template",
            )
        opens = not self.continue_final_message and self.add_generation_prompt is not False
        return ChatOptions(
            tools=[tool.for_template() for tool in tools] or None,
            documents=self.documents,
            open_answer=opens,
            continue_final=self.continue_final_message,
            variables=self.chat_template_kwargs or {},
            template=self.chat_template,
        )


class ChatFields(TemplateFields, ToolFields):
    """The fields of all requests that hold a chat, but for its messages."""
