"""How each family of models writes calls: one exact form, for forced calls and for the prompt of
models whose chat template has no tools."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...settings.settings import ToolParserName
from .call_parsers import CallParser, HermesParser, LlamaParser, MistralParser

# Most calls of an answer with forced calls: a weak model would repeat itself without end.
MAX_FORCED_CALLS = 16
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """The text around the names and arguments of calls.

    before, after  around all calls
    open           up to the name; between: up to the arguments; close: behind them
    separator      between calls
    tags           the texts that may be special tokens of a model
    """

    before: str = ""
    open: str
    between: str
    close: str
    separator: str
    after: str = ""
    tags: tuple[str, ...] = ()

    def spell(self, calls: Iterable[tuple[str, str]]) -> str:
        """The text of calls, given as names and arguments."""
        texts = [f"{self.open}{name}{self.between}{args}{self.close}" for name, args in calls]
        return f"{self.before}{self.separator.join(texts)}{self.after}"


HERMES = CallSyntax(
    open='<tool_call>\n{"name": "',
    between='", "arguments": ',
    close="}\n</tool_call>",
    separator="\n",
    tags=("<tool_call>", "</tool_call>"),
)
LLAMA = CallSyntax(open='{"name": "', between='", "parameters": ', close="}", separator="; ")
MISTRAL = CallSyntax(
    before="[TOOL_CALLS] [",
    open='{"name": "',
    between='", "arguments": ',
    close="}",
    separator=", ",
    after="]",
    tags=("[TOOL_CALLS]",),
)
PLAIN_JSON = CallSyntax(
    before="[",
    open='{"name": "',
    between='", "arguments": ',
    close="}",
    separator=", ",
    after="]",
)


def explain_tools(syntax: CallSyntax, tools: Sequence[Mapping[str, Any]], *, must: bool) -> str:
    """The system text that describes tools where the chat template does not."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = syntax.spell([("NAME", '{"ARGUMENT": VALUE}')])
    when = "Answer by calling" if must else "Where it helps, answer by calling"
    return (
        f"You can call these tools, each described by a JSON schema:\n{listed}\n\n"
        f"{when} one or more of them, in exactly this form:\n{example}"
    )


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Nine letters and digits: Mistral's templates refuse any other."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """A format of tool calls.

    marks      texts in a chat template by which the family is recognised
    foreign    texts of other families that have the same marks
    parser     of calls that a model makes freely; None: there is none
    """

    name: str
    syntax: CallSyntax
    parser: type[CallParser] | None
    marks: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    new_id: Callable[[], str] = _long_id


FAMILIES = (
    ToolFamily("mistral", MISTRAL, MistralParser, ("[TOOL_CALLS]",), (), _short_id),
    # Qwen3-Coder and GLM put XML into the same tags.
    ToolFamily("hermes", HERMES, HermesParser, ("<tool_call>",), ("<function=", "<arg_key>")),
    ToolFamily(
        "llama3_json", LLAMA, LlamaParser, ("<|python_tag|>", "dictionary of argument name"),
        ("<function=",),
    ),
)  # fmt: skip
# Where the family is not known: calls can be forced, but are not looked for in free text.
UNKNOWN = ToolFamily("none", PLAIN_JSON, None)


def tool_family(name: ToolParserName, template: str) -> ToolFamily:
    """The family by its name, or by a chat template where the name is `auto`."""
    if name != "auto":
        return next((family for family in FAMILIES if family.name == name), UNKNOWN)
    return next((family for family in FAMILIES if _matches(family, template)), UNKNOWN)


def _matches(family: ToolFamily, template: str) -> bool:
    has_mark = any(mark in template for mark in family.marks)
    return has_mark and not any(mark in template for mark in family.foreign)
