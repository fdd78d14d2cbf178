"""How each family of models writes calls: one exact form, for forced calls and for the prompt of
models whose chat template has no tools."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from ....models.text.grammar_messages import lark_text
from ...settings.settings import ToolParserName
from ..schema.chat import FunctionDefinition
from .call_parsers import CallParser, HermesParser, LlamaParser, MistralParser, ObjectScanner, State
from .events import CallOutput, Event

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


Schema = dict[str, Any]

# What a branch costs beside its names, and what a function may cost; a larger one stays open.
BRANCH_COST = 100
MAX_COST = 20_000
# Keys beside a `$ref` that limit nothing.
_ANNOTATIONS = {
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "description", "examples",
    "title", "type",
}  # fmt: skip
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


def argument_schema(function: FunctionDefinition) -> Schema:
    """A schema that allows objects alone, all of which fit the function's own parameters."""
    schema = function.parameters or {"type": "object", "properties": {}}
    closing = _Closing(schema)
    closed = closing.close(schema, _Declared())
    return closed if closing.room >= 0 else _with(schema, {"type": "object"})


@dataclass(slots=True)
class _Declared:
    """The properties that a schema declares, in all of its parts.

    names, patterns  of properties, those of branches included
    required         names that every object has; texts: the only values of a property
    is_open          the schema says itself which others there may be
    """

    names: dict[str, bool] = field(default_factory=dict)
    patterns: dict[str, bool] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    texts: dict[str, frozenset[str]] = field(default_factory=dict)
    is_open: bool = False

    def beside(self, other: _Declared) -> _Declared:
        """The declarations of two schemas that both hold."""
        return _Declared(
            self.names | other.names,
            self.patterns | other.patterns,
            self.required | other.required,
            self.texts | other.texts,
            self.is_open or other.is_open,
        )

    def excludes(self, other: _Declared) -> bool:
        """Whether no object of `other`, closed, is one of this schema, which need not be closed."""
        if not other.patterns and not self.required <= other.names.keys():
            return True
        both = self.texts.keys() & other.texts.keys() & other.required
        return any(self.texts[name].isdisjoint(other.texts[name]) for name in both)


class _Closing:
    """Closes one schema. Where `room` ends below 0, the work grew too large: it is of no use."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self.room = MAX_COST

    def close(self, schema: Schema, beside: _Declared) -> Schema:
        """`schema` for objects with no other properties than it declares, or those `beside` it."""
        self.room -= BRANCH_COST + len(beside.names)
        if self.room < 0:
            return schema
        if (target := self._replaced(schema)) is not None:
            return self.close(target, beside)
        for key in ("oneOf", "anyOf"):
            branches = _schemas(schema.get(key))
            if not branches or branches != schema[key] or len(branches) * BRANCH_COST > self.room:
                continue
            rest = {name: value for name, value in schema.items() if name != key}
            here = beside.beside(self._declared(rest))
            if not here.is_open and (key == "anyOf" or self._are_apart(branches, here)):
                return {**schema, key: [self.close(branch, here) for branch in branches]}
        declared = beside.beside(self._declared(schema))
        if declared.is_open:
            return _with(schema, {"type": "object"})
        limits: Schema = {"properties": declared.names, "additionalProperties": False}
        if declared.patterns:
            limits["patternProperties"] = declared.patterns
        return _with(schema, {"type": "object", **limits})

    def _are_apart(self, branches: Sequence[Schema], beside: _Declared) -> bool:
        """Whether an object of one closed branch fits no other, as `oneOf` demands."""
        every = [beside.beside(self._declared(branch)) for branch in branches]
        return not any(one.is_open for one in every) and all(
            other.excludes(one) for one in every for other in every if other is not one
        )

    def _declared(self, schema: Schema) -> _Declared:
        found = _Declared()
        followed: set[str] = set()
        least = 0
        parts = deque([(schema, True)])
        while parts and self.room >= 0:
            part, always = parts.popleft()
            properties = _mapping(part.get("properties"))
            required = [name for name in _list(part.get("required")) if isinstance(name, str)]
            names = dict.fromkeys((*properties, *required), True)
            patterns = dict.fromkeys(_mapping(part.get("patternProperties")), True)
            self.room -= 1 + len(names) + len(patterns)
            found.names |= names
            found.patterns |= patterns
            found.is_open |= part.get("additionalProperties", False) is not False
            found.is_open |= "const" in part or "enum" in part
            if isinstance(part.get("minProperties"), int):
                least = max(least, part["minProperties"])
            if always:
                found.required |= set(required)
                found.texts |= _texts(properties)
            ref = part.get("$ref")
            if isinstance(ref, str) and ref not in followed:
                followed.add(ref)
                target = self._target(ref)
                found.is_open |= target is None
                parts.append((target or {}, always))
            parts.extend((branch, always) for branch in _schemas(part.get("allOf")))
            for key in ("oneOf", "anyOf"):
                parts.extend((branch, False) for branch in _schemas(part.get(key)))
        found.is_open |= least > len(found.names)
        return found

    def _replaced(self, schema: Schema) -> Schema | None:
        """The schema that a root or branch refers to, where nothing beside the `$ref` limits it."""
        ref = schema.get("$ref")
        rest = {key: value for key, value in schema.items() if key not in {"$ref", "type"}}
        if not isinstance(ref, str) or not rest.keys() <= _ANNOTATIONS:
            return None
        target = self._target(ref) if schema.get("type", "object") == "object" else None
        return None if target is None else {**target, **rest}

    def _target(self, ref: str) -> Schema | None:
        """The target of a JSON pointer into the schema; None: missing, or in another document."""
        start, *steps = unquote(ref).split("/")
        if start != "#":
            return None
        found: Any = self._root
        for step in steps:
            if isinstance(found, list) and _INDEX.fullmatch(step) and int(step) < len(found):
                found = found[int(step)]
            else:
                found = _mapping(found).get(step.replace("~1", "/").replace("~0", "~"))
        return found if isinstance(found, dict) else None


def _with(schema: Schema, limits: Schema) -> Schema:
    return {**schema, "allOf": [*_list(schema.get("allOf")), limits]}


def _texts(properties: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """The values of properties that may be nothing but some texts."""
    found = {}
    for name, schema in properties.items():
        known = _mapping(schema)
        values = [known["const"]] if "const" in known else _list(known.get("enum"))
        if values and all(isinstance(value, str) for value in values):
            found[name] = frozenset(values)
    return found


def _mapping(value: Any) -> dict[str, Any]:
    """A mapping of a client's schema, which may be wrong; llguidance reports errors."""
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _schemas(value: Any) -> list[Schema]:
    """Branches, but for those that declare nothing, such as `true`."""
    return [branch for branch in _list(value) if isinstance(branch, dict)]


# As json.dumps spaces it, which models have seen most; any spaces would let weak models write
# nothing else.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


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
    rest = f" ({literal(syntax.separator, special_ids)} call){{0,{more}}}" if more else ""
    names = " | ".join(f"call_{index}" for index in range(len(functions)))
    calls = [
        literal(syntax.before, special_ids), f"call{rest}", literal(syntax.after, special_ids)
    ]  # fmt: skip
    rules = [
        f"calls: {' '.join(part for part in calls if part)}",
        f"call: {literal(syntax.open, special_ids)} ({names}) {literal(syntax.close, special_ids)}",
    ]
    for index, function in enumerate(functions):
        head = literal(function.name + syntax.between, special_ids)
        schema = {**argument_schema(function), "x-guidance": _SPACING}
        rules.append(f"call_{index}: {head} %json {json.dumps(schema)}")
    return "\n".join(rules)


def literal(text: str, special_ids: Mapping[str, int]) -> str:
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


class ForcedCallParser:
    """Reads calls of one syntax; what does not follow it is content.

    An answer that is cut off inside of a call's arguments has them as far as they came. One that is
    cut off before its first call is content; the beginning of a further call is left out.
    """

    def __init__(self, syntax: CallSyntax, new_id: Callable[[], str]) -> None:
        self._syntax = syntax
        self._out = CallOutput(new_id)
        self._buffer = ""
        self._header = ""
        self._scanner = ObjectScanner()
        self._state: Callable[[], bool] = self._first

    def push(self, text: str) -> list[Event]:
        """Events that become certain with the next piece of text."""
        self._buffer += text
        while self._state():
            pass
        return self._out.take()

    def finish(self) -> list[Event]:
        """The rest, after the end of the answer."""
        if not self._out.num_calls:
            header = self._header if self._state == self._name else ""
            self._out.text(header + self._buffer)
        self._buffer = ""
        self._out.finish()
        return self._out.take()

    # A state reads the start of the buffer; it returns whether it got further.

    def _first(self) -> bool:
        return self._expect(self._syntax.before + self._syntax.open, self._name)

    def _name(self) -> bool:
        name, between, rest = self._buffer.partition(self._syntax.between)
        if not between:
            return False
        self._buffer = rest
        self._out.start(name)
        self._scanner = ObjectScanner()
        self._state = self._arguments
        return True

    def _arguments(self) -> bool:
        end = self._scanner.feed(self._buffer)
        is_broken = self._scanner.state is State.BROKEN
        self._out.arguments(self._buffer[: end - is_broken])
        self._buffer = self._buffer[end - is_broken :]
        if self._scanner.state is State.OPEN:
            return False
        self._out.end_call()
        self._state = self._text if is_broken else self._close
        return True

    def _close(self) -> bool:
        return self._expect(self._syntax.close, self._next)

    def _next(self) -> bool:
        syntax = self._syntax
        separator = syntax.separator + syntax.open
        if self._buffer and not separator.startswith(self._buffer[: len(separator)]):
            return self._expect(syntax.after, self._text)
        return self._expect(separator, self._name)

    def _text(self) -> bool:
        self._out.text(self._buffer)
        self._buffer = ""
        return False

    def _expect(self, literal: str, then: Callable[[], bool]) -> bool:
        if self._buffer.startswith(literal):
            self._header = literal
            self._buffer = self._buffer[len(literal) :]
            self._state = then
            return True
        if literal.startswith(self._buffer):
            return False
        self._state = self._text
        return True
