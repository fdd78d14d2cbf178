"""The tools that a chat request offers, and which of them the answer may or must call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

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
