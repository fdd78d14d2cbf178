"""Which tools an answer may or must call."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..errors import bad_request
from ..schema.tools import AllowedToolsChoice, NamedTool, Tool, ToolFields


@dataclass(frozen=True, slots=True)
class ChosenTools:
    """The tools that the model is told of, and of these the ones it may call.

    must      it has to call one
    is_named  it has to call exactly this one, once
    """

    tools: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    must: bool = False
    is_named: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools that may be called."""
        return tuple(tool.function.name for tool in self.callable)


def choose_tools(fields: ToolFields) -> ChosenTools:
    """What `tools` and `tool_choice` say together. Raises `ApiError` 400 naming the field."""
    tools, choice = tuple(fields.tools or ()), fields.tool_choice
    by_name = {tool.function.name: tool for tool in tools}
    if len(by_name) < len(tools):
        raise bad_request("tools", "two tools have one name")
    if not tools:
        if choice in (None, "none", "auto"):
            return ChosenTools()
        raise bad_request("tool_choice", "needs tools")
    match choice:
        case "none":
            return ChosenTools()
        case NamedTool():
            return ChosenTools(tools, _named([choice], by_name), must=True, is_named=True)
        case AllowedToolsChoice():
            allowed = _named(choice.allowed_tools.tools, by_name)
            return ChosenTools(tools, allowed, must=choice.allowed_tools.mode == "required")
    return ChosenTools(tools, tools, must=choice == "required")


def call_limit(fields: ToolFields, chosen: ChosenTools) -> int | None:
    """Most calls of the answer; None: the server's own limit."""
    return 1 if chosen.is_named or fields.parallel_tool_calls is False else None


def _named(named: Collection[NamedTool], by_name: dict[str, Tool]) -> tuple[Tool, ...]:
    names = dict.fromkeys(tool.function.name for tool in named)
    unknown = next((name for name in names if name not in by_name), None)
    if unknown is not None:
        raise bad_request("tool_choice", f"{unknown!r} is not one of the tools")
    return tuple(by_name[name] for name in names)
