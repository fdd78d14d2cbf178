"""The body of `POST /v1/responses` with its items, and its form as a chat.

A client may send back whatever a response held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from .chat import MAX_TOOLS, ToolName
from .protocol import MAX_TOP_LOGPROBS, ChatForm
from .request_models import ANYWHERE_REFUSED, Refused, StrictModel

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
    """A refusal in an assistant's message."""

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
    """A part of a model's reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(StrictModel):
    """A model's reasoning before its answer."""

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


MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
LOGPROBS = "message.output_text.logprobs"

_STATELESS = "responses are not kept; send the whole conversation as input"
RESPONSES_REFUSED: dict[str, Refused] = {
    **{name: refused for name, refused in ANYWHERE_REFUSED.items() if name != "metadata"},
    "previous_response_id": Refused(_STATELESS),
    "conversation": Refused(_STATELESS),
    "prompt": Refused("no prompts are kept; send input"),
    "background": Refused("responses are not kept", (False,)),
    "background_options": Refused("responses are not kept", ({},)),
    "context_management": Refused("nothing is left out of a context", ([],)),
    "truncation": Refused("see truncate_prompt_tokens", ("disabled",)),
    "max_tool_calls": Refused("this server runs no tools"),
    "moderation": Refused("nothing is moderated"),
    "image": Refused("prompts are text"),
    "access_programs": Refused("there are none", ({},)),
    "response_format": Refused("send text.format"),
    "max_tokens": Refused("send max_output_tokens"),
    "n": Refused("a response has one answer", (1,)),
    "prompt_logprobs": Refused("see /v1/completions"),
    "return_token_ids": Refused("see /v1/chat/completions", (False,)),
}


class FunctionTool(StrictModel):
    """A function, as this API spells it."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """The tool of a chat."""
        return {"type": "function", "function": self.model_dump(exclude={"type"})}


class FunctionChoice(StrictModel):
    """The function to call."""

    type: Literal["function"]
    name: str

    def for_chat(self) -> dict[str, Any]:
        """The choice as chat requests spell it."""
        return {"type": "function", "function": {"name": self.name}}


class AllowedFunctions(StrictModel):
    """Some of the functions, and whether one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=MAX_TOOLS)]

    def for_chat(self) -> dict[str, Any]:
        """The choice as chat requests spell it."""
        allowed = {"mode": self.mode, "tools": [tool.for_chat() for tool in self.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}


class TextFormat(StrictModel):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """The chat's `response_format`."""
        if self.type != "json_schema":
            return {"type": self.type}
        schema = {"name": self.name or "answer", "schema": self.json_schema, "strict": self.strict}
        return {"type": "json_schema", "json_schema": schema}


class TextConfig(StrictModel):
    """`text` of the body."""

    format: TextFormat = TextFormat()
    verbosity: Literal["medium"] | None = None


class Reasoning(StrictModel):
    """`reasoning` of the body, as responses hold it where nothing was asked for."""

    effort: None = None
    summary: None = None
    generate_summary: None = None


class ResponsesRequest(ChatForm):
    """`POST /v1/responses`: one answer to a text or to the items of a conversation."""

    refused: ClassVar[Mapping[str, Refused]] = RESPONSES_REFUSED
    names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "prompt": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
    }
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedFunctions = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        default_factory=list
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    metadata: dict[str, str] = Field(default_factory=dict)

    @field_validator("metadata")
    @classmethod
    def _check_metadata(cls, value: dict[str, str]) -> dict[str, str]:
        if len(value) > MAX_METADATA:
            raise ValueError(f"at most {MAX_METADATA} keys")
        for key, text in value.items():
            if len(key) > MAX_METADATA_KEY_CHARS or len(text) > MAX_METADATA_VALUE_CHARS:
                raise ValueError(
                    f"keys have at most {MAX_METADATA_KEY_CHARS} characters, values at most "
                    f"{MAX_METADATA_VALUE_CHARS}"
                )
        return value

    @field_validator("store")
    @classmethod
    def _check_store(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("responses are not kept; send false or leave it out")
        return value

    @property
    def num_logprobs(self) -> int | None:
        """`top_logprobs` where `include` asks for any."""
        return (self.top_logprobs or 0) if LOGPROBS in self.include else None

    def chat_fields(self) -> dict[str, Any]:
        """The chat; log-probabilities where `include` asks for them."""
        body: dict[str, Any] = {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self.text.format.for_chat(),
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if self.tools:
            choice = self.tool_choice
            body["tools"] = [tool.for_chat() for tool in self.tools]
            body["tool_choice"] = choice if isinstance(choice, str) else choice.for_chat()
            body["parallel_tool_calls"] = self.parallel_tool_calls
        if self.num_logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": self.num_logprobs}
        return body

    def _messages(self) -> list[dict[str, Any]]:
        first = [] if self.instructions is None else [_message("system", self.instructions)]
        if isinstance(self.input, str):
            return [*first, _message("user", self.input)]
        return [*first, *chat_messages(self.input)]


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
