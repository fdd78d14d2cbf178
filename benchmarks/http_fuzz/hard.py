"""What is legal and costly, or nearly legal: grammars, schemas, tools, lists and stop texts."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from .values import MARKER, TEXTS, nested

EXPONENTIAL_REGEX = [
    "(a+)+$", "(a|a)*b", "(a|aa)+c", "(.*)(.*)(.*)x", "((a{1,50}){1,50}){1,50}", "[\\s\\S]{1,5000}",
    "(?=a)b", "a{99999}", "(", "\\p{L}{1,300}", f"{MARKER}|(x?){{40}}x{{40}}", "",
]  # fmt: skip
LARK = [
    's: "a" | s s | s s s | s s s s | s s s s s\nstart: s',
    "start: /(a|b|ab)+/",
    'start: start "a" | "b"',
    "start: a\na: b\nb: a",
    f'start: "{MARKER}" start | ""',
    'start: "a"~1..3000',
    "start: /[^x]*/ /[^y]*/ /[^z]*/",
    "start:",
    "not a grammar " + MARKER,
    "start: " + " | ".join(f'"{MARKER}{index}"' for index in range(400)),
    "start: " + "(" * 200 + '"a"' + ")" * 200,
]


def _objects(count: int) -> dict[str, Any]:
    """An `anyOf` of so many objects."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {f"{MARKER}{index}": {"type": "integer"}, "b": {"type": "string"}},
                "required": [f"{MARKER}{index}"],
            }
            for index in range(count)
        ]
    }


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {MARKER: {"type": "integer"}}, "required": [MARKER]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 5},
    {"type": "string", "pattern": "(a|aa)+$"},
    {"type": "string", "minLength": 100_000},
    {"type": "integer", "minimum": 10**30, "maximum": 10**31},
    {"type": "array", "minItems": 2000, "uniqueItems": True, "items": {"type": "null"}},
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"$ref": "http://127.0.0.1:1/" + MARKER},
    {"type": "object", "additionalProperties": {"$ref": "#"}},
    {"enum": [MARKER, None, 1, {"a": [1]}]},
    {"enum": []},
    {"not": {}},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {"type": MARKER},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"patternProperties": {"(": {}}},
    _objects(3), _objects(400),
    {"type": "object", "properties": {f"p{i}": _objects(3) for i in range(60)}},
    nested(60, in_objects=True),
    {},
]  # fmt: skip
CHOICES = st.one_of(
    st.lists(st.sampled_from([MARKER, "yes", "no", *TEXTS]), max_size=5),
    st.sampled_from([1000, 1024, 1025, 4000]).map(
        lambda count: [f"{MARKER}{index:x}" for index in range(count)]
    ),
)

json_schemas = st.sampled_from(SCHEMAS)
structured_outputs = st.one_of(
    json_schemas.map(lambda schema: {"json": schema}),
    st.sampled_from(EXPONENTIAL_REGEX).map(lambda regex: {"regex": regex}),
    st.sampled_from(LARK).map(lambda grammar: {"grammar": grammar}),
    CHOICES.map(lambda choice: {"choice": choice}),
    st.just({"json_object": True}),
    st.just({"json_object": True, "regex": "a"}),
)
response_formats = st.one_of(
    json_schemas.map(
        lambda schema: {"type": "json_schema", "json_schema": {"name": MARKER, "schema": schema}}
    ),
    st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": MARKER}, {}]),
)
stops = st.one_of(
    st.lists(st.sampled_from([MARKER, "e", " ", *TEXTS]), max_size=5),
    st.sampled_from(["a" * 4096, "a" * 4097, ["a"] * 16, ["a"] * 17, ["ab" * 500] * 16]),
)
logit_biases = st.one_of(
    st.dictionaries(st.integers(-1, 600).map(str), st.floats(-101, 101), max_size=5),
    st.sampled_from([{str(i): 1.0 for i in range(count)} for count in (300, 1024, 1025)]),
)
tool_names = st.sampled_from(["get_weather", MARKER, "a" * 64, "a" * 65, "", "a b", "\u00e9"])
tools = st.lists(
    st.builds(
        lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}},
        tool_names,
        json_schemas,
    ),
    max_size=3,
)
tool_choices = st.one_of(
    st.sampled_from(["none", "auto", "required", MARKER]),
    tool_names.map(lambda name: {"type": "function", "function": {"name": name}}),
)
# As `/v1/responses` spells them.
flat_tools = tools.map(lambda found: [{"type": "function", **tool["function"]} for tool in found])
flat_tool_choices = st.one_of(
    st.sampled_from(["none", "auto", "required", MARKER]),
    tool_names.map(lambda name: {"type": "function", "name": name}),
)
prompts = st.one_of(
    st.sampled_from([MARKER, f"def {MARKER}(a, b):\n    return", "a", *TEXTS]),
    st.lists(st.integers(0, 300), min_size=1, max_size=20),
    st.lists(st.sampled_from([MARKER, "def f(x):"]), min_size=1, max_size=6),
    st.sampled_from([[MARKER] * 64, [MARKER] * 257, [[1]] * 40, MARKER * 2000, [0] * 255]),
)
