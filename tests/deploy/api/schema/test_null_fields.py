"""null of an optional field is as good as leaving it out, on every route and in every object."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from draftline.deploy.api.routes.generation import BODIES
from draftline.deploy.api.routes.models import HEADER
from draftline.deploy.api.schema.request_models import StrictModel
from support.fakes.fake_engine import FakeEngine, byte_tokenizer

# Takes tools, calls and what they returned, unlike the fake's own.
TEMPLATE = (
    "{{ tools or '' }}{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}\n"
    "{% endfor %}<assistant>"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "parameters": PARAMETERS}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SAMPLING: dict[str, Any] = {
    "speculative": {"enabled": False},
    "stream": True,
    "stream_options": {"include_usage": True},
    "logit_bias": {"5": 1},
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
RESPONSES: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "m"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "hi"},
    ],
    "tools": [{"type": "function", **WEATHER}],
    "metadata": {"a": "b"},
    "reasoning": {},
    "speculative": {"enabled": False},
}
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    {"role": "assistant", "function_call": {"name": "weather"}},
    {"role": "user", "content": "hi"},
]
TOOLS = [{"type": "function", "function": WEATHER}]
NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
# Together they hold every object that a body may hold.
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "abc", **SAMPLING}),
    ("/v1/completions", {"prompt": "abc", "structured_outputs": {"json": PARAMETERS}}),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, "tool_choice": ALLOWED}),
    ("/v1/chat/completions", {"messages": MESSAGES, "response_format": FORM, **SAMPLING}),
    ("/v1/responses", RESPONSES | {"tool_choice": {"type": "function", "name": "weather"}}),
    (
        "/v1/responses",
        RESPONSES
        | {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "weather"}],
            },
            "stream": True,
        },
    ),
    ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_object"}}}),
    ("/tokenize", {"prompt": "abc"}),
    ("/tokenize", {"messages": MESSAGES, "tools": TOOLS}),
    ("/detokenize", {"tokens": [1, 2]}),
]
# What stands in these is no field of a request.
FREE = {"parameters", "schema", "json", "logit_bias", "metadata"}
# Names of the fields of all objects.
NAMES = {
    field.alias or name
    for model in (*StrictModel.__subclasses__(), *BODIES.values())
    for name, field in model.model_fields.items()
}


def with_nulls(value: Any) -> Any:
    """Null in every object for a name that nobody knows, and for each that some object has."""
    if isinstance(value, list):
        return [with_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    nulls = dict.fromkeys(NAMES | {"async_", "unheard_of"})
    inner = {key: item if key in FREE else with_nulls(item) for key, item in value.items()}
    return nulls | inner


@pytest.fixture
async def roomy(serving: Any) -> AsyncIterator[tuple[httpx.AsyncClient, FakeEngine]]:
    """A server of hermes calls and thoughts, whose context has room for tools."""
    engine = FakeEngine(CALL)
    engine.max_model_len = 4096
    engine.tokenizer = byte_tokenizer()
    engine.tokenizer.chat_template = TEMPLATE
    async with serving(engine, tool_call_parser="hermes") as client:
        yield client, engine


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_nulls_everywhere_change_nothing(
    roomy: tuple[httpx.AsyncClient, FakeEngine], path: str, body: dict[str, Any]
) -> None:
    client, engine = roomy
    plain = await client.post(path, json=body)
    assert plain.status_code == 200, plain.text
    with_null = await client.post(path, json=with_nulls(body))
    assert with_null.status_code == 200, with_null.text
    assert engine.calls[:1] == engine.calls[1:]


async def test_ignored_nulls_are_not_named(serving: Any, engine: FakeEngine) -> None:
    async with serving(engine, ignore_unknown_fields=True) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "unheard_of": None})
    assert answer.status_code == 200
    assert HEADER not in answer.headers


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": None}, "prompt"),
        ("/v1/completions", {"prompt": [None]}, "prompt"),
        ("/v1/completions", {"prompt": ["a", None]}, "prompt"),
        ("/v1/completions", {"prompt": [[1, None]]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": None}}, "logit_bias.5"),
        ("/v1/completions", {"prompt": "a", "stop": [None]}, "stop"),
        ("/v1/completions", {"prompt": "a", "unheard_of": 1}, "unheard_of"),
        ("/v1/chat/completions", {"messages": None}, "messages"),
        ("/v1/chat/completions", {"messages": [None]}, "messages.0"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, "messages.0"),
        ("/v1/chat/completions", {"messages": [{"role": None, "content": "a"}]}, "messages.0.role"),
        ("/v1/responses", {"input": None}, "input"),
        ("/v1/responses", {"input": [None]}, "input.0"),
        ("/v1/responses", {"input": [{"role": "user", "content": None}]}, "input.0.content"),
        ("/v1/responses", {"input": "a", "metadata": {"a": None}}, "metadata.a"),
        ("/tokenize", {"prompt": None}, None),
        ("/detokenize", {"tokens": None}, "tokens"),
        ("/detokenize", {"tokens": [None]}, "tokens"),
    ],
)
async def test_null_where_a_value_must_stand_is_named(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_a_null_limit_of_a_completion_is_its_default(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """16 tokens, as OpenAI has it."""
    for body in ({}, {"max_tokens": None}):
        await client.post("/v1/completions", json={"prompt": "abc", **body})
    assert [call[1].max_tokens for call in engine.calls] == [16, 16]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answer", ["So it is.", CALL, f"<think>hm</think>Look: {CALL}"])
async def test_responses_are_taken_back_as_the_official_client_dumps_them(
    serving: Any, answer: str, stream: bool
) -> None:
    engine = FakeEngine(answer)
    engine.max_model_len = 4096
    engine.tokenizer.chat_template = TEMPLATE
    tools: Any = [{"type": "function", **WEATHER}]
    items: list[Any] = [{"role": "user", "content": "hi"}]
    more: dict[str, Any] = {"model": "tiny", "tools": tools, "max_output_tokens": 200}
    more |= {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    options = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    async with serving(engine, **options) as http, official_client(http) as official:
        for _ in range(2):
            if stream:
                events = [
                    event
                    async for event in await official.responses.create(
                        input=items, stream=True, **more
                    )
                ]
                response = events[-1].response
            else:
                response = await official.responses.create(input=items, **more)
            dumped = [item.model_dump() for item in response.output]
            assert has_null(dumped)
            items += dumped
            items += [
                {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
                for item in response.output
                if item.type == "function_call"
            ]
    asked = engine.tokenizer.decode([*engine.calls[1][0]])
    assert ("[weather]" in asked) == (CALL in answer)
    assert ("<tool>sunny" in asked) == (CALL in answer)


@pytest.mark.parametrize("answer", ["So it is.", CALL, f"<think>hm</think>Look: {CALL}"])
async def test_chat_messages_are_taken_back_as_the_official_client_dumps_them(
    serving: Any, answer: str
) -> None:
    engine = FakeEngine(answer)
    engine.max_model_len = 4096
    engine.tokenizer.chat_template = TEMPLATE
    tools: Any = [{"type": "function", "function": WEATHER}]
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    options = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    async with serving(engine, **options) as http, official_client(http) as official:
        for _ in range(2):
            completion = await official.chat.completions.create(
                model="tiny", messages=messages, tools=tools, max_tokens=200
            )
            message = completion.choices[0].message
            dumped = message.model_dump()
            assert has_null(dumped)
            messages.append(dumped)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
                for call in message.tool_calls or ()
            ]
    asked = engine.tokenizer.decode([*engine.calls[1][0]])
    assert ("[weather]" in asked) == (CALL in answer)


def official_client(http: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="x", base_url="http://test/v1", http_client=http, max_retries=0
    )


def has_null(value: Any) -> bool:
    return ": null" in json.dumps(value)
