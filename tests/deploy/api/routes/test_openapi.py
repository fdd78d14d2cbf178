"""`/openapi.json`: bodies and errors as they are."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator, ValidationError
from support.fakes.fake_engine import FakeEngine

MESSAGES = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "Hi!"}]
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
SCHEMA = {"name": "event", "strict": True, "schema": WEATHER["parameters"]}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
}
# The shapes of the examples of OpenAI's API reference.
EXAMPLES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "m", "prompt": "Say this is a test", "max_tokens": 7}),
    ("/v1/completions", {"model": "m", "prompt": ["a", "b"], "n": 2, "stop": ["\n"], "echo": True}),
    ("/v1/completions", {"model": "m", "prompt": [[1, 2], [3]], "logprobs": 3, "best_of": 1}),
    ("/v1/completions", {"model": "m", "prompt": "a", "stream": True, "suffix": None}),
    ("/v1/chat/completions", {"model": "m", "messages": MESSAGES}),
    ("/v1/chat/completions", {"model": "m", "messages": MESSAGES, "stream": True, "user": "u"}),
    (
        "/v1/chat/completions",
        {"model": "m", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "tools": []},
    ),
    (
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": SCHEMA},
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "tool_calls": [CALL],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            ],
            "tools": [{"type": "function", "function": WEATHER}],
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        },
    ),
    ("/v1/responses", {"model": "m", "input": "Tell me a story."}),
    (
        "/v1/responses",
        {
            "model": "m",
            "instructions": "You are a pirate.",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
            "tools": [{"type": "function", **WEATHER}],
            "tool_choice": "none",
            "text": {"format": {"type": "json_schema", **SCHEMA}},
            "stream": True,
            "previous_response_id": None,
        },
    ),
    ("/tokenize", {"model": "m", "prompt": "a"}),
    ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": None}),
    ("/detokenize", {"tokens": [1, 2]}),
]
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "m"}),
    ("/v1/completions", {"prompt": "a", "temprature": 1}),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}),
    ("/v1/completions", {"prompt": ""}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": MESSAGES, "n": "2"}),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}),
]


@pytest.fixture
async def client(serving: Any) -> AsyncIterator[httpx.AsyncClient]:
    engine = FakeEngine()
    engine.max_model_len = 4096
    async with serving(engine) as client:
        yield client


@pytest.fixture
async def schema(client: httpx.AsyncClient) -> dict[str, Any]:
    return (await client.get("/openapi.json")).json()


def validator(schema: dict[str, Any], path: str) -> Draft202012Validator:
    body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return Draft202012Validator({**body, "components": schema["components"]})


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for inner in part.values():
            yield from references(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from references(inner)


async def test_every_body_and_every_error_has_a_schema(schema: dict[str, Any]) -> None:
    assert schema["openapi"].startswith("3.1")
    takes_nothing = {"/v1/responses/{response_id}/cancel"}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            error = operation["responses"]["default"]["content"]["application/json"]["schema"]
            assert error == {"$ref": "#/components/schemas/Error"}
            assert "422" not in operation["responses"]
            if method == "post" and path not in takes_nothing:
                assert operation["requestBody"]["required"]
                Draft202012Validator.check_schema(validator(schema, path).schema)


async def test_references_lead_somewhere(schema: dict[str, Any]) -> None:
    found = set(references(schema))
    assert len(found) > 10
    for reference in found:
        part: Any = schema
        for name in reference.removeprefix("#/").split("/"):
            part = part[name]
    operations = [
        operation["operationId"] for one in schema["paths"].values() for operation in one.values()
    ]
    assert len(operations) == len(set(operations))


@pytest.mark.parametrize(("path", "body"), EXAMPLES)
async def test_bodies_of_the_api_reference(
    schema: dict[str, Any], client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    body |= {"model": "tiny", "unheard_of": None}
    validator(schema, path).validate(body)
    response = await client.post(path, json=body)
    # The fake's template refuses messages of tools.
    assert response.status_code == 200 or "no tools here" in response.text, response.text


@pytest.mark.parametrize(("path", "body"), WRONG)
async def test_wrong_bodies_fit_no_schema(
    schema: dict[str, Any], client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        validator(schema, path).validate(body)
    assert (await client.post(path, json=body)).status_code == 400


async def test_an_error_is_as_it_is_told(schema: dict[str, Any], client: httpx.AsyncClient) -> None:
    error = Draft202012Validator(schema["components"]["schemas"]["Error"])
    for method, path in (("GET", "/nowhere"), ("GET", "/v1/completions"), ("POST", "/tokenize")):
        response = await client.request(method, path)
        assert response.status_code >= 400
        error.validate(json.loads(response.text))
