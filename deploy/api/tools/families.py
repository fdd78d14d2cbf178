"""Families of models by how they call tools and think, chosen by name or by a chat template."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from ...settings.settings import ToolParserName
from .call_parsers import CallParser, HermesParser, LlamaParser, MistralParser
from .call_syntax import HERMES, LLAMA, MISTRAL, PLAIN_JSON, CallSyntax

_ALPHANUMERIC = string.ascii_letters + string.digits


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Nine letters and digits: Mistral's templates refuse any other."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """One way of calling tools.

    marks      texts in a chat template that tell the family
    foreign    texts that tell another one, although the marks are there
    parser     reads what a model writes freely; None: there is none
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
