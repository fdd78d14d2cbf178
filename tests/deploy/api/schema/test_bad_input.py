"""Every wrong request gets a 4xx that names the field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GOOD = {"model": "tiny", "prompt": "x = 1", "max_tokens": 4}
GOOD_CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
HUGE = 10**30


def check_error(response: httpx.Response, status: int, param: str | None) -> str:
    """The error's message, after its shape was checked."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status
    assert body["error"]["param"] == param
    return body["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("prompt", "", "empty"),
        ("prompt", [], "empty"),
        ("prompt", [[]], "empty"),
        ("prompt", ["a", ""], "empty"),
        ("prompt", None, "text"),
        ("prompt", 3, "text"),
        ("prompt", {"a": 1}, "text"),
        ("prompt", [1, "a"], "token id"),
        ("prompt", ["a", 1], "text"),
        ("prompt", [-1], "token id"),
        ("prompt", [True], "token id"),
        ("prompt", [HUGE], "token id"),
        ("prompt", [300], "vocabulary"),
        ("prompt", "x" * 128, "context of 128"),
        ("prompt", ["x"] * 257, "257 prompts; at most 256"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -5, "0 or more"),
        ("max_tokens", HUGE, "at most 123 fit"),
        ("max_tokens", 124, "at most 123 fit"),
        ("max_tokens", "4", "integer"),
        ("max_tokens", 4.0, "integer"),
        ("max_tokens", True, "integer"),
        ("temperature", -0.1, "from 0 to 100"),
        ("temperature", HUGE, "from 0 to 100"),
        ("temperature", "hot", "number"),
        ("temperature", True, "number"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.01, "at most 1"),
        ("top_p", [1], "number"),
        ("top_k", -2, "0 (off)"),
        ("top_k", HUGE, "less than or equal"),
        ("top_k", 1.5, "integer"),
        ("min_p", -1, "from 0 to 1"),
        ("seed", -2, "from 0"),
        ("seed", HUGE, "from 0"),
        ("seed", 1.5, "integer"),
        ("stop", 3, "text"),
        ("stop", ["a", 3], "text"),
        ("stop", "", "empty"),
        ("stop", ["s"] * 17, "at most 16"),
        ("stop_token_ids", [-1], "token id"),
        ("stop_token_ids", ["a"], "integer"),
        ("ignore_eos", 1, "boolean"),
        ("stream", "yes", "boolean"),
        ("stream_options", 1, "object"),
        ("speculative", True, "object"),
        ("speculative", {"max_tokens": -1}, "0 or more"),
        ("speculative", {"max_tokens": 1.5}, "integer"),
        ("speculative", {"max_context": -1}, "0 or more"),
        ("speculative", {"drafters": "spectra"}, "list"),
        ("n", 0, "greater than or equal to 1"),
        ("n", 257, "at most 256"),
        ("typical_p", 0, "above 0"),
        ("min_tokens", 99, "max_tokens"),
        ("min_tokens", -1, "0 or more"),
        ("presence_penalty", 2.5, "-2 to 2"),
        ("frequency_penalty", "1", "number"),
        ("repetition_penalty", 0, "above 0"),
        ("logit_bias", {"x": 1}, "token id"),
        ("logit_bias", {"5": 101}, "-100 to 100"),
        ("logit_bias", [5], "dict"),
        ("allowed_token_ids", [], "not be empty"),
        ("allowed_token_ids", [-1], "token id"),
        ("banned_token_ids", "a", "list"),
        ("logprobs", 21, "0 to 20"),
        ("logprobs", True, "integer"),
        ("prompt_logprobs", -1, "0 to 20"),
        ("echo", 1, "boolean"),
        ("response_format", {"type": "xml"}, "json_schema"),
        ("response_format", {"type": "json_schema"}, "json_schema"),
        ("response_format", {"type": "text", "jsn_schema": {}}, "unknown field"),
        ("structured_outputs", {}, "one of"),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}, "one of"),
        ("structured_outputs", {"regex": ""}, "empty"),
        ("priority", HUGE, "from"),
        ("priority", "high", "integer"),
        ("cache_salt", "x" * 513, "512"),
        ("cache_salt", 5, "string"),
        ("model", 3, "string"),
    ],
)
async def test_wrong_value(client: httpx.AsyncClient, field: str, value: Any, hint: str) -> None:
    response = await client.post(COMPLETIONS, json=GOOD | {field: value})
    message = check_error(response, 400, message_param(response, field))
    assert field in message
    assert hint in message


def message_param(response: httpx.Response, field: str) -> str:
    """Errors inside a list or an object have a longer path, which begins with the field."""
    param = response.json()["error"]["param"]
    assert param.split(".")[0] == field
    return param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("suffix", "end"),
        ("metadata", {"a": "b"}),
    ],
)
async def test_unsupported_field_with_a_meaning(
    client: httpx.AsyncClient, field: str, value: Any
) -> None:
    response = await client.post(COMPLETIONS, json=GOOD | {field: value})
    assert "not supported" in check_error(response, 400, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [("functions", [{}]), ("prediction", {"type": "content"}), ("audio", {"voice": "alloy"})],
)
async def test_unsupported_chat_field(client: httpx.AsyncClient, field: str, value: Any) -> None:
    response = await client.post(CHAT, json=GOOD_CHAT | {field: value})
    assert "not supported" in check_error(response, 400, field)


async def test_neutral_values_and_caller_names_are_accepted(client: httpx.AsyncClient) -> None:
    neutral = {
        "n": 1, "best_of": 1, "logprobs": None, "echo": False, "suffix": None,
        "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "me",
    }  # fmt: skip
    response = await client.post(COMPLETIONS, json=GOOD | neutral)
    assert response.status_code == 200, response.text
    chat = {"logprobs": False, "tools": [], "response_format": {"type": "text"}, "user": "me"}
    response = await client.post(CHAT, json=GOOD_CHAT | chat)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("field", "nearest"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("logprob", "logprobs")],
)
async def test_unknown_field_names_the_nearest(
    client: httpx.AsyncClient, field: str, nearest: str
) -> None:
    response = await client.post(COMPLETIONS, json=GOOD | {field: 1})
    assert f"did you mean {nearest!r}" in check_error(response, 400, field)


async def test_unknown_field_of_an_inner_object(client: httpx.AsyncClient) -> None:
    body = GOOD | {"speculative": {"enable": True}}
    response = await client.post(COMPLETIONS, json=body)
    assert "unknown field" in check_error(response, 400, "speculative.enable")


async def test_missing_prompt(client: httpx.AsyncClient) -> None:
    response = await client.post(COMPLETIONS, json={"model": "tiny"})
    assert "is required" in check_error(response, 400, "prompt")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        [{"role": "user"}],
        [{"role": "pirate", "content": "hi"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": [{"type": {}, "text": "x"}]}],
        [{"role": "user", "content": [{"type": [], "text": "x"}]}],
        [{"role": "tool", "content": "the template refuses this role"}],
    ],
)
async def test_wrong_messages(client: httpx.AsyncClient, messages: Any) -> None:
    response = await client.post(CHAT, json=GOOD_CHAT | {"messages": messages})
    check_error(response, 400, message_param(response, "messages"))


async def test_chat_limits_that_disagree(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json=GOOD_CHAT | {"max_completion_tokens": 5})
    assert "disagree" in check_error(response, 400, None)


async def test_chat_limit_is_named_as_it_was_sent(client: httpx.AsyncClient) -> None:
    body = {"messages": GOOD_CHAT["messages"], "max_completion_tokens": 0}
    response = await client.post(CHAT, json=body)
    check_error(response, 400, "max_completion_tokens")


async def test_stream_options_without_stream(client: httpx.AsyncClient) -> None:
    response = await client.post(COMPLETIONS, json=GOOD | {"stream_options": {}})
    assert "stream: true" in check_error(response, 400, None)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[1]", b'"text"', b"null", b"\xff\xfe", b'{"prompt": NaN}',
        b"[" * 100_000, b"9" * 10_000, b'{"model": "tiny", "prompt": "\\ud800"}',
    ],
)  # fmt: skip
async def test_invalid_json(client: httpx.AsyncClient, body: bytes) -> None:
    assert check_error(await client.post(COMPLETIONS, content=body), 400, None)


async def test_body_over_the_limit(serving: Any, engine: Any) -> None:
    async with serving(engine, max_body_bytes=1024) as client:
        response = await client.post(COMPLETIONS, json=GOOD | {"prompt": "x" * 2000})
        assert "1024 bytes" in check_error(response, 413, None)
    assert engine.calls == []


async def test_unknown_model_names_the_known_one(client: httpx.AsyncClient) -> None:
    message = check_error(await client.post(COMPLETIONS, json=GOOD | {"model": "m"}), 404, "model")
    assert "'tiny'" in message
    check_error(await client.get("/v1/models/m"), 404, "model")


async def test_unknown_route_and_method(client: httpx.AsyncClient) -> None:
    check_error(await client.get("/v1/nothing"), 404, None)
    check_error(await client.get(COMPLETIONS), 405, None)


async def test_bad_tokens_to_detokenize(client: httpx.AsyncClient) -> None:
    for tokens in ([256], [-1], "abc", [HUGE]):
        response = await client.post("/detokenize", json={"tokens": tokens})
        check_error(response, 400, "tokens")


async def test_tokenize_wants_one_of_two(client: httpx.AsyncClient) -> None:
    for body in ({}, {"prompt": "a", "messages": GOOD_CHAT["messages"]}):
        check_error(await client.post("/tokenize", content=json.dumps(body)), 400, None)


@pytest.mark.parametrize("kind", [{}, [], 3, True, "pirate"])
@pytest.mark.parametrize(
    ("field", "spell"),
    [
        ("input", lambda kind: [{"type": kind, "role": "pirate", "content": "hi"}]),
        ("input", lambda kind: [{"role": "user", "content": [{"type": kind, "text": "hi"}]}]),
        ("tools", lambda kind: [{"type": kind, "name": "f"}]),
        ("tool_choice", lambda kind: {"type": kind, "name": "f"}),
        ("text", lambda kind: {"format": {"type": kind}}),
    ],
)
async def test_types_of_responses_are_known_texts(
    client: httpx.AsyncClient, field: str, spell: Any, kind: Any
) -> None:
    body = {"input": "hi", field: spell(kind)}
    response = await client.post("/v1/responses", json=body)
    assert response.status_code == 400, response.text
