"""Strategies for what requests hold: values at borders and wrong ones, costly forms, fields."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Strategy = st.SearchStrategy[Any]
# Stands in every request, and must stand in no log.
MARKER = "zq7Kx9marker"

NUMBERS: list[Any] = [
    0, -1, 1, 2, 5, 20, 21, 255, 256, 257, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63,
    -(2**31) - 1, -(2**63) - 1, 10**30, -0.0, 0.5, 1.0, 1.5, 2.0, 1e-300, 5e-324, 1e308, -1e308,
    float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
TEXTS = [
    "", " ", "\n", "\0", "\ud800", "\udfff\ud800", "NaN", "-1", "null", "true", "1e999", "\u202e",
    "e\u0301", "\U0001f600" * 3, "\ufeff", "\x7f\x1b[31m", "{{ 7 * 7 }}", "{% for", "<|im_end|>",
    "<think>", "<tool_call>{", "\"'\\", "../../etc/passwd", "%s%n", "a" * 5000, "\u00e9" * 3000,
]  # fmt: skip

numbers = st.sampled_from(NUMBERS) | st.integers(-3, 40) | st.floats(-3, 3)
# With surrogates, which JSON can spell and UTF-8 cannot.
odd_texts = st.sampled_from(TEXTS) | st.text(st.characters(exclude_categories=()), max_size=12)
short_texts = odd_texts.map(lambda text: text[:40])
texts = st.just(MARKER) | odd_texts.map(lambda text: MARKER + text) | odd_texts
anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(short_texts, inner, max_size=3),
    max_leaves=6,
)
huge = st.sampled_from([300, 1025, 5000, 20000]).flatmap(
    lambda count: st.sampled_from(
        [
            [MARKER] * count,
            list(range(count)),
            [[]] * count,
            {f"{MARKER}{index}": index for index in range(count)},
            {str(index): 1.5 for index in range(count)},
            MARKER * (count // 4),
            "\n" * count,
        ]
    )
)


def nested(depth: int, *, in_objects: bool) -> Any:
    """Lists, or objects, within one another."""
    value: Any = MARKER
    for _ in range(depth):
        value = {"a": value} if in_objects else [value]
    return value


deep = st.builds(nested, st.sampled_from([5, 62, 63, 64, 65, 200]), in_objects=st.booleans())
# What a field was not made for.
wrong = st.one_of(anything, anything, numbers, texts, huge, deep)


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


ids = st.lists(st.integers(0, 300), min_size=1, max_size=6)
contents = st.one_of(
    texts,
    st.just(MARKER),
    st.lists(texts.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=3),
)
calls = st.lists(
    st.builds(
        lambda name, arguments: {
            "id": "call_1",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        },
        tool_names,
        st.sampled_from(["{}", "", "{", f'{{"a": "{MARKER}"}}', "[" * 2000, "NaN", "null"]),
    ),
    max_size=2,
)
message = st.one_of(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "user", "system", "assistant", "developer"]),
        contents,
    ),
    st.builds(
        lambda content, made: {"role": "assistant", "content": content, "tool_calls": made},
        contents | st.none(),
        calls,
    ),
    contents.map(lambda text: {"role": "tool", "tool_call_id": "call_1", "content": text}),
)
inputs = st.one_of(
    texts,
    st.lists(
        st.one_of(
            st.builds(
                lambda role, text: {"role": role, "content": text},
                st.sampled_from(["user", "system", "assistant"]),
                texts,
            ),
            tool_names.map(
                lambda name: {
                    "type": "function_call", "call_id": "a", "name": name, "arguments": "{}"
                }
            ),
            texts.map(
                lambda text: {"type": "function_call_output", "call_id": "a", "output": text}
            ),
        ),
        min_size=1,
        max_size=4,
    ),
)  # fmt: skip
formats = st.one_of(
    st.just({"type": "json_object"}),
    json_schemas.map(
        lambda schema: {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    ),
)
COMMON: dict[str, Strategy] = {
    "model": st.just("demo"),
    "prompt": prompts,
    "messages": st.lists(message, min_size=1, max_size=4),
    "max_tokens": st.integers(0, 8),
    "max_completion_tokens": st.integers(1, 8),
    "min_tokens": st.integers(0, 8),
    "n": st.sampled_from([1, 1, 1, 2, 3, 20, 257]),
    "best_of": st.just(1),
    "temperature": st.sampled_from([0, 0.7, 1.0, 2.0]),
    "top_p": st.sampled_from([0.01, 0.1, 0.9, 1.0]),
    "top_k": st.sampled_from([-1, 0, 1, 5, 2**31 - 1]),
    "min_p": st.sampled_from([0.0, 0.05, 1.0]),
    "typical_p": st.sampled_from([0.2, 1.0]),
    "seed": st.sampled_from([-1, 0, 1, 2**31, 2**63 - 1]),
    "repetition_penalty": st.sampled_from([1e-3, 0.5, 1.0, 1.2, 2.0]),
    "presence_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
    "frequency_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
    "logprobs": st.sampled_from([True, False, 0, 2, 20, 21]),
    "top_logprobs": st.sampled_from([0, 2, 20]),
    "prompt_logprobs": st.sampled_from([0, 1, 20]),
    "truncate_prompt_tokens": st.sampled_from([-1, 1, 20, 2**31 - 1]),
    "stop": stops,
    "stop_token_ids": ids,
    "allowed_token_ids": ids | st.just(list(range(200))),
    "banned_token_ids": ids | st.just(list(range(500))),
    "bad_words": st.lists(short_texts | st.just(MARKER), max_size=4),
    "logit_bias": logit_biases,
    "structured_outputs": structured_outputs,
    "response_format": response_formats,
    "tools": tools,
    "tool_choice": tool_choices,
    "schema": json_schemas,
    "parameters": json_schemas,
    "priority": st.integers(0, 3),
    "tokens": st.lists(st.integers(0, 600), max_size=30) | st.just([5] * 20_000),
    "drafters": st.lists(
        st.sampled_from(["prompt_lookup", "suffix", "spectra", MARKER]), max_size=3
    ),
}
# As `/v1/messages` spells them.
blocks = st.one_of(
    texts.map(lambda text: {"type": "text", "text": text}),
    texts.map(lambda text: {"type": "thinking", "thinking": text, "signature": ""}),
    tool_names.map(lambda name: {"type": "tool_use", "id": "a", "name": name, "input": {"a": 1}}),
    texts.map(lambda text: {"type": "tool_result", "tool_use_id": "a", "content": text}),
    st.just({"type": "image", "source": {"type": "base64", "data": MARKER}}),
)
MESSAGES: dict[str, Strategy] = {
    "messages": st.lists(
        st.builds(
            lambda role, content: {"role": role, "content": content},
            st.sampled_from(["user", "user", "assistant"]),
            texts | st.just(MARKER) | st.lists(blocks, min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=4,
    ),
    "system": texts | st.just([{"type": "text", "text": MARKER}]),
    "tools": st.lists(
        st.builds(
            lambda name, schema: {"name": name, "description": "a", "input_schema": schema},
            tool_names,
            json_schemas,
        ),
        max_size=3,
    ),
    "tool_choice": st.one_of(
        st.sampled_from([{"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": MARKER}]),
        tool_names.map(lambda name: {"type": "tool", "name": name}),
    ),
    "max_tokens": st.integers(1, 8),
    "stop_sequences": st.lists(short_texts | st.just(MARKER), max_size=4),
    "thinking": st.sampled_from([{"type": "disabled"}, {"type": "enabled", "budget_tokens": 4}]),
    "metadata": st.just({"user_id": MARKER}),
}
# As `/v1/responses` spells them.
RESPONSES: dict[str, Strategy] = {
    "input": inputs,
    "max_output_tokens": st.integers(1, 8),
    "tools": flat_tools,
    "tool_choice": flat_tool_choices,
    "text": formats.map(lambda form: {"format": form}),
    "n": st.just(1),
    "include": st.just(["message.output_text.logprobs"]),
    "store": st.just(False),
    "metadata": st.dictionaries(short_texts, short_texts, max_size=2),
}
