"""The body of `POST /v1/responses`, and the chat that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from ..errors import ApiError, bad_request
from .protocol import MAX_TOP_LOGPROBS, ChatRequest, GenerationRequest, SpeculativeOptions
from .request_models import StrictModel
from .response_items import MAX_ITEMS, InputItem, chat_messages
from .size_checks import ANYWHERE_REFUSED, Refused
from .tools import MAX_TOOLS, ToolName

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
# Names of a chat's fields in this body.
_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
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


class ResponsesRequest(GenerationRequest):
    """`POST /v1/responses`: one answer to a text or to the items of a conversation.

    Sampling fields beyond OpenAI's are those of chats.
    """

    refused: ClassVar[Mapping[str, Refused]] = RESPONSES_REFUSED
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

    @field_validator("speculative")
    @classmethod
    def _check_explain(cls, value: SpeculativeOptions) -> SpeculativeOptions:
        if value.explain:
            raise ValueError("explain: see /v1/chat/completions")
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

    def chat(self) -> ChatRequest:
        """The chat that this body stands for. Raises `ApiError` 400 naming the field."""
        shared = self.model_fields_set & GenerationRequest.model_fields.keys()
        body = {name: getattr(self, name) for name in shared - set(self.refused)}
        body["messages"] = self._messages()
        body["max_completion_tokens"] = self.max_output_tokens
        body["response_format"] = self.text.format.for_chat()
        body["chat_template_kwargs"] = self.chat_template_kwargs
        if self.tools:
            choice = self.tool_choice
            body["tools"] = [tool.for_chat() for tool in self.tools]
            body["tool_choice"] = choice if isinstance(choice, str) else choice.for_chat()
            body["parallel_tool_calls"] = self.parallel_tool_calls
        if self.num_logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": self.num_logprobs}
        try:
            return ChatRequest.build(body)
        except ApiError as error:
            raise named_here(error) from error

    def _messages(self) -> list[dict[str, Any]]:
        first = [] if self.instructions is None else [_message("system", self.instructions)]
        if isinstance(self.input, str):
            return [*first, _message("user", self.input)]
        return [*first, *chat_messages(self.input)]


def named_here(error: ApiError) -> ApiError:
    """An error of a chat, with the names that its fields have in this body."""
    name = error.param or ""
    field = _NAMES.get(name.split(".")[0], name.replace(".function", ""))
    if field == name:
        return error
    return bad_request(field, error.message.removeprefix(f"{name}: "))


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
