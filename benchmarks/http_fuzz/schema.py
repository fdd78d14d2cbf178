"""Strategies from the server's own `/openapi.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from .values import anything, numbers, short_texts, texts

Strategy = st.SearchStrategy[Any]
Schema = Mapping[str, Any]
NOT_SUPPORTED = "not supported"


class Schemas:
    """Values that the schemas of a document allow, or nearly: not all limits are in a schema.

    hints  strategies for properties of these names, wherever they stand
    """

    def __init__(self, document: Schema, hints: Mapping[str, Strategy]) -> None:
        self._definitions: Mapping[str, Schema] = document["components"]["schemas"]
        self._hints = hints
        self._made: dict[str, Strategy] = {}

    def fields(self, path: str, document: Schema) -> tuple[dict[str, Strategy], list[str]]:
        """The properties of the body that is posted to a path; of them, the required ones.

        Properties that the server knows and refuses are left out.
        """
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        schema = self._definitions[_name_of(body["schema"]["$ref"])]
        served = {
            name: self._property(name, inner)
            for name, inner in schema["properties"].items()
            if not inner.get("description", "").startswith(NOT_SUPPORTED)
        }
        return served, list(schema.get("required", ()))

    def _property(self, name: str, schema: Schema) -> Strategy:
        return self._hints[name] if name in self._hints else self.values(schema)

    def values(self, schema: Schema) -> Strategy:
        """Values that a schema allows."""
        if "$ref" in schema:
            return self._referred(_name_of(schema["$ref"]))
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                return st.one_of([self.values(one) for one in schema[key]])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if "const" in schema:
            return st.just(schema["const"])
        make: dict[str, Callable[[Schema], Strategy]] = {
            "object": self._object,
            "array": self._array,
            "string": lambda _: texts,
            "integer": _integers,
            "number": lambda _: st.floats(-2, 3) | numbers,
            "boolean": lambda _: st.booleans(),
            "null": lambda _: st.none(),
        }
        kind = schema.get("type")
        return make[kind](schema) if isinstance(kind, str) else anything

    def _referred(self, name: str) -> Strategy:
        if name not in self._made:
            self._made[name] = st.deferred(lambda: self.values(self._definitions[name]))
        return self._made[name]

    def _object(self, schema: Schema) -> Strategy:
        properties = schema.get("properties")
        if properties is None:
            inner = schema.get("additionalProperties")
            values = self.values(inner) if isinstance(inner, Mapping) else anything
            keys = st.integers(0, 300).map(str) | short_texts
            return st.dictionaries(keys, values, max_size=4)
        required = schema.get("required", ())
        made = {name: self._property(name, inner) for name, inner in properties.items()}
        return st.fixed_dictionaries(
            {name: made[name] for name in required},
            optional={name: made[name] for name in made if name not in required},
        )

    def _array(self, schema: Schema) -> Strategy:
        least = schema.get("minItems", 0)
        return st.lists(self.values(schema.get("items", {})), min_size=least, max_size=least + 3)


def _integers(schema: Schema) -> Strategy:
    least = max(schema.get("minimum", -2), -2)
    return st.integers(least, min(schema.get("maximum", 300), 300))


def _name_of(reference: str) -> str:
    return reference.rpartition("/")[2]
