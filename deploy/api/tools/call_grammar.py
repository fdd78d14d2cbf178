"""Lark grammars of answers that must call tools, and of what may stand before an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ....core.errors import RequestError
from ....core.request.constraint import StructuredOutput
from ....models.text.lark import lark_choice, lark_regex, lark_text
from ..schema.tools import FunctionDefinition
from .argument_schema import argument_schema
from .call_syntax import MAX_FORCED_CALLS, CallSyntax
from .reasoning import THINK_CLOSE, THINK_OPEN

# As json.dumps spaces it, which models have seen most; any spaces would let weak models write
# nothing else.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Kinds of forms that can follow reasoning; a grammar of the client's own starts where it starts.
WRAPPED_KINDS = ("json_object", "json", "choice", "regex")


def call_grammar(
    syntax: CallSyntax,
    functions: Sequence[FunctionDefinition],
    special_ids: Mapping[str, int],
    *,
    max_calls: int | None,
) -> str:
    """Rules for `calls`: at least one call, and at most `max_calls`.

    special_ids  ids of the special tokens that the syntax may name
    """
    more = (max_calls or MAX_FORCED_CALLS) - 1
    rest = f" ({_literal(syntax.separator, special_ids)} call){{0,{more}}}" if more else ""
    names = " | ".join(f"call_{index}" for index in range(len(functions)))
    calls = [
        _literal(syntax.before, special_ids), f"call{rest}", _literal(syntax.after, special_ids)
    ]  # fmt: skip
    rules = [
        f"calls: {' '.join(part for part in calls if part)}",
        f"call: {_literal(syntax.open, special_ids)} ({names}) "
        f"{_literal(syntax.close, special_ids)}",
    ]
    for index, function in enumerate(functions):
        head = _literal(function.name + syntax.between, special_ids)
        schema = {**argument_schema(function), "x-guidance": _SPACING}
        rules.append(f"call_{index}: {head} %json {json.dumps(schema)}")
    return "\n".join(rules)


def with_start(rules: str, body: str, thinking: str) -> str:
    """A whole grammar: `thinking` (see `thinking_rules`) and then the rule `body`."""
    if not thinking:
        return f"start: {body}\n{rules}\n"
    return f"start: thinking {body}\n{thinking}\n{rules}\n"


def thinking_rules(special_ids: Mapping[str, int], *, has_begun: bool) -> str:
    """The rule `thinking`: what a model thinks before its answer, if it does.

    has_begun  the prompt ends inside of it already
    """
    close = special_ids.get(THINK_CLOSE)
    if close is None:
        thought = f"thought[suffix={lark_text(THINK_CLOSE)}]: /(.|\\n)*/"
    else:
        thought = f"thought: /(.|\\n)*/ <[{close}]>"
    begin = "" if has_begun else _literal(THINK_OPEN, special_ids) + " "
    thinking = f"{begin}thought /\\s*/"
    return f"thinking: {thinking if has_begun else f'({thinking})?'}\n{thought}"


def form_rules(output: StructuredOutput) -> str | None:
    """The rule `form` for a structured output; None where it cannot be put behind reasoning.

    Raises `RequestError`.
    """
    match output.kind:
        case "json_object":
            return 'form: %json {"type": "object"}'
        case "json":
            return f"form: %json {json.dumps(_json(output))}"
        case "regex":
            return f"form: {lark_regex(output.value)}"
        case "choice":
            return f"form: {lark_choice(_json(output))}"
        case "grammar":
            return None


def _literal(text: str, special_ids: Mapping[str, int]) -> str:
    """A text in Lark's syntax, its special tokens by their ids; "" for no text."""
    if not text:
        return ""
    if not special_ids:
        return lark_text(text)
    parts = re.split("(" + "|".join(map(re.escape, special_ids)) + ")", text)
    return " ".join(
        f"<[{special_ids[part]}]>" if part in special_ids else lark_text(part)
        for part in parts
        if part
    )


def _json(output: StructuredOutput) -> Any:
    try:
        return json.loads(output.value)
    except (ValueError, RecursionError) as error:
        raise RequestError("structured_outputs", f"is not valid JSON: {error}") from None
