"""The schema that the arguments of a forced call follow: what its function declares, and no more.

A model that may add properties of its own often writes nothing else. `additionalProperties` sees
only the properties beside it, not those of a `$ref` or of branches, so a schema whose root has some
is closed by the names of all of them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from ..schema.tools import FunctionDefinition

Schema = dict[str, Any]

# What a branch costs beside its names, and what a function may cost; a larger one stays open.
BRANCH_COST = 100
MAX_COST = 20_000
# What stands beside a `$ref` and limits nothing.
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
    """What a schema says of the properties of its objects, in all of its parts.

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
        """What two schemas say that both hold."""
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
        """What a JSON pointer into the schema names; None: nothing, or another document."""
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
    """Of a client's schema, which may be anything; llguidance says what is wrong with it."""
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _schemas(value: Any) -> list[Schema]:
    """Branches, but for those that declare nothing, such as `true`."""
    return [branch for branch in _list(value) if isinstance(branch, dict)]
