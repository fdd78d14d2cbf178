"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's form of a chat.

A client may send back whatever a message held. Marks for a prompt cache are accepted and change
nothing: prefixes are shared by themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from .chat import MAX_PARTS, MAX_SHOWN, MAX_TOOLS, ToolName
from .protocol import ChatForm
from .request_models import ANYWHERE_REFUSED, Refused, StrictModel

# Of what a client sends along; it asks for nothing.
Anything = dict[str, Any] | list[Any] | str


class Block(StrictModel):
    """What all blocks of a message may have."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: Anything | None = None


class ThinkingBlock(Block):
    """The model's reasoning before its answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Block):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Anything | None = None
    toolset_name: str | None = None

    def for_chat(self) -> dict[str, Any]:
        """The call of an assistant's message."""
        arguments = json.dumps(self.input, ensure_ascii=False)
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolResultBlock(Block):
    """What a tool returned, or the error that it ended with; both are text for the model."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool = False
    toolset_name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _check_kinds(cls, value: Any) -> Any:
        return check_kinds(value, ("text",))

    def for_chat(self) -> dict[str, Any]:
        """The message of a chat."""
        content = self.content
        text = content if isinstance(content, str) else joined(content or ())
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": text}


MessageBlock = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
KINDS = ("text", "thinking", "tool_use", "tool_result")


def check_kinds(value: Any, kinds: Sequence[str]) -> Any:
    """The content unchanged. Raises `ValueError` that names a block of another kind."""
    for index, block in enumerate(value if isinstance(value, list) else ()):
        kind = block.get("type") if isinstance(block, Mapping) else getattr(block, "type", None)
        if kind not in kinds:
            shown = repr(kind[:MAX_SHOWN]) if isinstance(kind, str) else "no known type"
            raise ValueError(f"block {index} has {shown}; this model takes {', '.join(kinds)}")
    return value


def joined(blocks: Sequence[TextBlock]) -> str:
    """The texts; each block is a line."""
    return "\n".join(block.text for block in blocks)


class MessageParam(StrictModel):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[MessageBlock], Field(max_length=MAX_PARTS)]

    @field_validator("content", mode="before")
    @classmethod
    def _check_kinds(cls, value: Any) -> Any:
        return check_kinds(value, KINDS)

    @model_validator(mode="after")
    def _check_role(self) -> MessageParam:
        blocks = self.content if isinstance(self.content, list) else []
        for index, block in enumerate(blocks):
            is_results = isinstance(block, ToolResultBlock)
            if not isinstance(block, TextBlock) and is_results != (self.role == "user"):
                raise ValueError(
                    f"block {index} of type {block.type} does not go with the role {self.role}"
                )
        return self

    def for_chat(self) -> Iterator[dict[str, Any]]:
        """The messages of a chat: each result of a tool is one."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        results = [block for block in self.content if isinstance(block, ToolResultBlock)]
        # A tool's results stand behind the call, and before what the user says of them.
        for result in results:
            yield result.for_chat()
        message: dict[str, Any] = {"role": self.role, "content": joined(texts)}
        calls = [block.for_chat() for block in self.content if isinstance(block, ToolUseBlock)]
        thoughts = [block for block in self.content if isinstance(block, ThinkingBlock)]
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = "\n".join(block.thinking for block in thoughts)
        if texts or not results:
            yield message


class ClientTool(StrictModel):
    """A tool that the client runs."""

    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    input_examples: Anything | None = None
    allowed_callers: Anything | None = None
    defer_loading: Literal[False] | None = None

    def for_chat(self) -> dict[str, Any]:
        """The tool of a chat."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


MODES = {"auto": "auto", "any": "required", "none": "none"}


class MessageToolChoice(StrictModel):
    """Whether a tool must be called, and which."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> MessageToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name goes with type tool, and only with it")
        return self

    def for_chat(self) -> str | dict[str, Any]:
        """The choice as chat requests spell it."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return MODES[self.type]


class Thinking(StrictModel):
    """Whether the model reasons first, where its template can say so. A budget changes nothing."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(StrictModel):
    """A schema that the answer follows."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """The form of the answer; `effort` changes nothing."""

    format: OutputFormat | None = None
    effort: str | None = None


MESSAGES_REFUSED: dict[str, Refused] = {
    **{name: refused for name, refused in ANYWHERE_REFUSED.items() if name != "metadata"},
    "service_tier": Refused("there is one tier", ("auto", "standard_only")),
    "stop": Refused("send stop_sequences"),
    "n": Refused("a message is one answer", (1,)),
    "response_format": Refused("send output_config.format"),
    "output_format": Refused("send output_config.format"),
    "prompt_logprobs": Refused("see /v1/completions"),
    "return_token_ids": Refused("see /v1/chat/completions", (False,)),
    "container": Refused("this server runs no code"),
    "mcp_servers": Refused("this server calls none", ([],)),
    "context_management": Refused("nothing is left out of a context", ({},)),
    "diagnostics": Refused("nothing is kept that it could compare with"),
    "inference_geo": Refused("it is where this server is"),
    "speed": Refused("there is one", ("standard",)),
    "user_profile_id": Refused("there are no profiles"),
    "workspace_id": Refused("there are no workspaces"),
}


class MessagesRequest(ChatForm):
    """`POST /v1/messages`: the next message of a chat."""

    refused: ClassVar[Mapping[str, Refused]] = MESSAGES_REFUSED
    names: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
    }
    # The other APIs have a default.
    max_tokens: Annotated[int, Field(ge=1)]  # pyright: ignore[reportGeneralTypeIssues, reportIncompatibleVariableOverride]
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    stop_sequences: list[str] | None = None
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None

    @field_validator("tools", mode="before")
    @classmethod
    def _check_tools(cls, value: Any) -> Any:
        for index, tool in enumerate(value if isinstance(value, list) else ()):
            kind = tool.get("type") if isinstance(tool, Mapping) else None
            if kind not in (None, "custom"):
                raise ValueError(
                    f"tool {index} has type {str(kind)[:MAX_SHOWN]!r}; this server runs no tools, "
                    "and takes those that the client runs ('custom')"
                )
        return value

    @property
    def num_logprobs(self) -> int | None:
        """This form has none."""
        return None

    def chat_fields(self) -> dict[str, Any]:
        """The chat; an assistant's last message is continued."""
        first = self.system if isinstance(self.system, str) else joined(self.system or ())
        messages = [{"role": "system", "content": first}] if first else []
        messages += [chat for message in self.messages for chat in message.for_chat()]
        last = messages[-1]
        fields: dict[str, Any] = {
            "messages": messages,
            "stop": self.stop_sequences,
            "chat_template_kwargs": self._variables(),
            "continue_final_message": last["role"] == "assistant" and "tool_calls" not in last,
        }
        if self.tools:
            choice = self.tool_choice or MessageToolChoice(type="auto")
            fields["tools"] = [tool.for_chat() for tool in self.tools]
            fields["tool_choice"] = choice.for_chat()
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        form = None if self.output_config is None else self.output_config.format
        if form is not None:
            schema = {"name": "answer", "schema": form.json_schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    def _variables(self) -> dict[str, Any] | None:
        if self.thinking is None:
            return self.chat_template_kwargs
        variable = {"enable_thinking": self.thinking.type != "disabled"}
        return variable | (self.chat_template_kwargs or {})


class CountTokensRequest(MessagesRequest):
    """`POST /v1/messages/count_tokens`."""

    max_tokens: Annotated[int, Field(ge=1)] = 1
