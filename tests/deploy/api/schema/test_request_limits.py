"""Every limit of a request: within it the request is served, beyond it a 400 names it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from draftline.core.errors import ConfigError
from draftline.deploy.api.errors import ApiError
from draftline.deploy.api.schema.request_models import count_values, read_json
from draftline.deploy.settings.settings import RequestLimits, ServerConfig
from hypothesis import given
from hypothesis import strategies as st

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"prompt": "x = 1", "max_tokens": 4}
HI = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


# limit, its value, path, a body that keeps it, one that does not, the field that is named
LIMITS = [
    ("max_json_values", 40, COMPLETIONS, PROMPT, PROMPT | {"stop_token_ids": [1] * 40}, None),
    ("max_json_depth", 3, COMPLETIONS, PROMPT, PROMPT | {"metadata": nested(4)}, "metadata"),
    ("max_prompts", 2, COMPLETIONS, {"prompt": ["a"] * 2}, {"prompt": ["a"] * 3}, "prompt"),
    ("max_prompts", 2, COMPLETIONS, {"prompt": [[1]] * 2}, {"prompt": [[1]] * 3}, "prompt"),
    ("max_answers", 4, COMPLETIONS, PROMPT | {"n": 4}, PROMPT | {"n": 5}, "n"),
    (
        "max_answers", 4, COMPLETIONS,
        {"prompt": ["a", "b"], "n": 2}, {"prompt": ["a", "b"], "n": 3}, "n",
    ),
    ("max_prompt_chars", 9, COMPLETIONS, PROMPT, {"prompt": ["aaaaa", "bbbbb"]}, "prompt"),
    ("max_prompt_chars", 4, CHAT, {"messages": [HI]}, {"messages": [HI] * 3}, "messages"),
    (
        "max_prompt_chars", 4, CHAT, {"messages": [HI]},
        {"messages": [HI | {"content": [{"type": "text", "text": "hello"}]}]}, "messages",
    ),
    ("max_messages", 2, CHAT, {"messages": [HI] * 2}, {"messages": [HI] * 3}, "messages"),
    (
        "max_content_parts", 1, CHAT,
        {"messages": [HI | {"content": [{"type": "text", "text": "a"}]}]},
        {"messages": [HI | {"content": [{"type": "text", "text": "a"}] * 2}]}, "messages",
    ),
    ("max_tools", 1, CHAT, {"messages": [HI]}, {"messages": [HI], "tools": [{}, {}]}, "tools"),
    (
        "max_tools_bytes", 9, CHAT, {"messages": [HI]},
        {"messages": [HI], "tools": [{"type": "function"}]}, "tools",
    ),
    (
        "max_stop_texts", 1, COMPLETIONS,
        PROMPT | {"stop": "a"}, PROMPT | {"stop": ["a"] * 2}, "stop",
    ),
    ("max_stop_chars", 3, COMPLETIONS, PROMPT | {"stop": "abc"}, PROMPT | {"stop": "abcd"}, "stop"),
    (
        "max_stop_chars_total", 5, COMPLETIONS,
        PROMPT | {"stop": ["abc", "de"]}, PROMPT | {"stop": ["abc", "def"]}, "stop",
    ),
    *[
        (
            "max_listed_tokens", 2, COMPLETIONS,
            PROMPT | {name: [1, 2]}, PROMPT | {name: [1] * 3}, name,
        )
        for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids")
    ],
    (
        "max_logit_biases", 1, COMPLETIONS,
        PROMPT | {"logit_bias": {"5": 1}}, PROMPT | {"logit_bias": {"5": 1, "6": 1}}, "logit_bias",
    ),
    (
        "max_grammar_bytes", 60, COMPLETIONS, PROMPT | {"structured_outputs": {"json": SCHEMA}},
        PROMPT | {"structured_outputs": {"json": SCHEMA | {"required": ["a"]}}},
        "structured_outputs.json",
    ),
    (
        "max_grammar_bytes", 60, CHAT, {"messages": [HI]},
        {
            "messages": [HI],
            "response_format": {
                "type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA},
            },
        },
        "response_format",
    ),
    *[
        (
            "max_grammar_bytes", 3, COMPLETIONS, PROMPT | {"structured_outputs": {name: "a"}},
            PROMPT | {"structured_outputs": {name: "éé"}}, f"structured_outputs.{name}",
        )
        for name in ("regex", "grammar", "json")
    ],
    (
        "max_choices", 2, COMPLETIONS, PROMPT | {"structured_outputs": {"choice": ["a", "b"]}},
        PROMPT | {"structured_outputs": {"choice": ["a", "b", "c"]}}, "structured_outputs.choice",
    ),
    (
        "max_json_depth", 3, COMPLETIONS, PROMPT,
        PROMPT | {"structured_outputs": {"json": json.dumps(nested(4))}}, "structured_outputs.json",
    ),
    (
        "max_named_drafters", 1, COMPLETIONS, PROMPT | {"speculative": {"drafters": ["a"]}},
        PROMPT | {"speculative": {"drafters": ["a", "b"]}}, "speculative.drafters",
    ),
    (
        "max_logprob_entries", 30, COMPLETIONS,
        {"prompt": "a" * 10, "prompt_logprobs": 2}, {"prompt": "a" * 11, "prompt_logprobs": 2},
        "prompt_logprobs",
    ),
    (
        "max_logprob_entries", 30, COMPLETIONS,
        {"prompt": "a" * 10, "echo": True, "logprobs": 0, "n": 3},
        {"prompt": "a" * 11, "echo": True, "logprobs": 0, "n": 3},
        "prompt_logprobs",
    ),
    (
        "max_answer_logprobs", 12, COMPLETIONS,
        PROMPT | {"logprobs": 2}, PROMPT | {"logprobs": 2, "n": 2}, "logprobs",
    ),
    ("max_detokenize_tokens", 2, "/detokenize", {"tokens": [1, 2]}, {"tokens": [1] * 3}, "tokens"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "path", "within", "beyond", "field"), LIMITS, ids=[one[0] for one in LIMITS]
)
async def test_limit(
    serving: Any,
    engine: Any,
    name: str,
    value: int,
    path: str,
    within: Any,
    beyond: Any,
    field: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_setting = name in RequestLimits.model_fields
    if not is_setting:
        monkeypatch.setattr(RequestLimits, name, value)
    async with serving(engine, limits={name: value} if is_setting else {}) as client:
        accepted = await client.post(path, json=within)
        assert accepted.status_code == 200, accepted.text
        engine.calls.clear()
        response = await client.post(path, json=beyond)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field
    assert str(value) in error["message"]
    if field is not None:
        assert (f"limits.{name}" in error["message"]) == is_setting
    assert engine.calls == []


def test_every_limit_is_tried() -> None:
    # Bad words are a text list like stop texts.
    known = {*RequestLimits.model_fields, *RequestLimits.__class_vars__}
    assert {one[0] for one in LIMITS} | {"max_bad_words"} == known - {"model_config"}


def test_limits_are_settings_that_are_checked() -> None:
    config = ServerConfig(limits={"max_prompts": 3})  # pyright: ignore[reportArgumentType]
    assert config.limits.max_prompts == 3
    assert config.limits.max_prompt_chars == RequestLimits().max_prompt_chars
    with pytest.raises(ConfigError, match="max_prompts") as caught:
        ServerConfig(limits={"max_promts": 3})  # pyright: ignore[reportArgumentType]
    assert caught.value.field == "limits.max_promts"
    with pytest.raises(ConfigError, match=r"limits\.max_prompts"):
        ServerConfig(limits={"max_prompts": 0})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, PROMPT | {"x" * 3_000_000: 1}),
        (COMPLETIONS, PROMPT | {"logit_bias": {"y" * 100_000: 1}}),
        (COMPLETIONS, PROMPT | {"stop_token_ids": ["z" * 100_000]}),
        (COMPLETIONS, PROMPT | {"model": "m" * 100_000}),
        (COMPLETIONS, {"prompt": [1, {"a": "b" * 100_000}]}),
        (CHAT, {"messages": [{"role": "tool" * 10_000, "content": "hi"}]}),
        ("/detokenize", {"tokens": [10**4000]}),
    ],
)
async def test_errors_repeat_little_of_what_was_sent(
    client: httpx.AsyncClient, path: str, body: Any
) -> None:
    response = await client.post(path, json=body)
    assert 400 <= response.status_code < 500
    assert len(response.text) < 800


async def test_deeply_nested_schema_as_a_text(client: httpx.AsyncClient) -> None:
    body = PROMPT | {"structured_outputs": {"json": "[" * 50_000}}
    response = await client.post(COMPLETIONS, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "structured_outputs.json"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def number_of_values(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + number_of_values(one) for one in value.values())
    return 1 + sum(map(number_of_values, value)) if isinstance(value, list) else 1


@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans())
def test_values_are_counted_outside_texts(value: dict[str, Any], is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode(errors="replace")
    counted = count_values(body)
    exact = number_of_values(json.loads(body))
    # Empty lists and objects count as if they held something.
    assert exact <= counted <= 2 * exact


def test_long_bodies_are_read_as_short_ones_are() -> None:
    value = {"a": [1, 2.5, None, True, "text, with: [separators]"] * 5000, "b": {"ü": {}}}
    assert read_json(json.dumps(value).encode(), 10**6) == value
    for wrong in ("[1, 2", '{"a": NaN}', '{"a": 1,}'):
        body = (f'{{"long": {json.dumps([0] * 20_000)}, "b": {wrong}}}').encode()
        with pytest.raises(ApiError, match="not valid JSON"):
            read_json(body, 10**6)
    deep = b'{"a": ' + b"[" * 100_000
    with pytest.raises(ApiError, match="nested too deeply"):
        read_json(deep, 10**6)


@pytest.mark.parametrize("text", ["\\ud800", "a\\udc00b", "\\udc00\\ud800"])
def test_half_a_surrogate_pair_is_found_wherever_it_stands(text: str) -> None:
    for body in (f'{{"a": [{{"b": "{text}"}}]}}', f'{{"{text}": 1}}'):
        with pytest.raises(ApiError, match="surrogate"):
            read_json(body.encode(), 100)
    assert read_json(b'{"a": "\\ud83d\\ude00"}', 100) == {"a": "\U0001f600"}
