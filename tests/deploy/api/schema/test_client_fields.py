"""Fields that clients of OpenAI and vLLM send: supported, neutral, or refused by name."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import httpx
import pytest
from draftline.deploy.api.schema.protocol import ChatRequest, CompletionRequest, GenerationRequest
from draftline.deploy.api.schema.request_models import CHAT_REFUSED, COMPLETION_REFUSED, IGNORED
from openai.types import completion_create_params as completion_types
from openai.types.chat import completion_create_params as chat_types
from support.fakes.fake_engine import FakeEngine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TEXT = "def f(x):\n    return x\n"
MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES = [
    (COMPLETIONS, CompletionRequest, {"prompt": "abc"}),
    (CHAT, ChatRequest, {"messages": MESSAGES}),
]
# What vLLM's servers take beyond OpenAI's fields.
VLLM_SAMPLING = {
    "use_beam_search", "top_k", "min_p", "repetition_penalty", "length_penalty", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "truncate_prompt_tokens", "allowed_token_ids", "bad_words",
    "prompt_logprobs", "add_special_tokens", "structured_outputs", "priority", "request_id",
    "return_tokens_as_token_ids", "return_token_ids", "cache_salt", "kv_transfer_params",
    "vllm_xargs", "logits_processors",
}  # fmt: skip


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize(
    ("types", "model"),
    [
        (completion_types.CompletionCreateParamsBase, CompletionRequest),
        (completion_types.CompletionCreateParamsStreaming, CompletionRequest),
        (chat_types.CompletionCreateParamsBase, ChatRequest),
        (chat_types.CompletionCreateParamsStreaming, ChatRequest),
    ],
)
def test_every_field_of_the_official_client_is_known(
    types: type, model: type[GenerationRequest]
) -> None:
    known = {*model.model_fields, *model.refused, *IGNORED}
    assert set(get_type_hints(types)) - known == set()


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest])
def test_every_field_of_vllm_is_known(model: type[GenerationRequest]) -> None:
    known = {*model.model_fields, *model.refused, *IGNORED}
    assert known >= VLLM_SAMPLING


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest])
def test_no_field_is_both_supported_and_refused(model: type[GenerationRequest]) -> None:
    assert not set(model.model_fields) & {*model.refused, *IGNORED}


@pytest.mark.parametrize(("path", "model", "body"), ROUTES)
async def test_null_is_as_good_as_leaving_a_field_out(
    client: httpx.AsyncClient, path: str, model: type[GenerationRequest], body: dict[str, Any]
) -> None:
    optional = [name for name, field in model.model_fields.items() if not field.is_required()]
    nothing = dict.fromkeys([*optional, *model.refused, *IGNORED])
    response = await client.post(path, json=body | nothing)
    assert response.status_code == 200, response.text
    inner = {"speculative": {"enabled": None, "report": None, "max_tokens": None}}
    response = await client.post(path, json=body | inner)
    assert response.status_code == 200, response.text
    options = {"include_usage": None, "include_obfuscation": None, "continuous_usage_stats": None}
    response = await client.post(path, json=body | {"stream": True, "stream_options": options})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "body", "name", "value"),
    [
        (path, body, name, value)
        for path, model, body in ROUTES
        for name, refused in model.refused.items()
        for value in refused.neutral
    ],
)
async def test_neutral_values(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], name: str, value: Any
) -> None:
    response = await client.post(path, json=body | {name: value})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "body", "name", "reason"),
    [
        (path, body, name, refused.reason)
        for path, body, table in (
            (COMPLETIONS, {"prompt": "abc"}, COMPLETION_REFUSED),
            (CHAT, {"messages": MESSAGES}, CHAT_REFUSED),
        )
        for name, refused in table.items()
    ],
)
async def test_a_refused_field_says_why(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], name: str, reason: str
) -> None:
    response = await client.post(path, json=body | {name: {"asks": "for something"}})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == name
    assert reason in error["message"]


async def test_sampling_fields_reach_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = {
        "prompt": "abc", "seed": -1, "bad_words": ["foo", "bar"], "skip_special_tokens": False,
        "include_stop_str_in_output": True, "n": 2, "best_of": 2,
    }  # fmt: skip
    assert (await client.post(COMPLETIONS, json=body)).status_code == 200
    params = engine.calls[0][1]
    assert params.seed is None
    assert params.bad_words == ("foo", "bar")
    assert params.include_stop_str_in_output
    assert not params.skip_special_tokens


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ([""], "empty"), (["x" * 129], "128 characters"), (["x"] * 257, "at most 256"),
        ("x", "list"), ([3], "string"),
    ],
)  # fmt: skip
async def test_bad_words_are_bounded(client: httpx.AsyncClient, value: Any, hint: str) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": "a", "bad_words": value})
    assert response.status_code == 400
    assert hint in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "schema",
    [
        {"name": "x", "strict": False, "schema": {"type": "object"}},
        {"name": "x", "schema": {"type": "object"}},
        {"name": "x"},
        {"name": "x", "strict": None, "description": None, "schema": None},
    ],
)
async def test_a_schema_constrains_also_where_strict_does_not_ask(
    client: httpx.AsyncClient, engine: FakeEngine, schema: dict[str, Any]
) -> None:
    form = {"type": "json_schema", "json_schema": schema}
    response = await client.post(CHAT, json={"messages": MESSAGES, "response_format": form})
    assert response.status_code == 200, response.text
    assert engine.calls[0][1].structured_output is not None


@pytest.mark.parametrize(
    ("most", "kept"), [(5, "fghij"), (10, "abcdefghij"), (99, "abcdefghij"), (-1, "abcdefghij")]
)
async def test_prompts_are_cut_at_their_start(
    client: httpx.AsyncClient, engine: FakeEngine, most: int, kept: str
) -> None:
    body = {"prompt": "abcdefghij", "truncate_prompt_tokens": most, "echo": True}
    response = await client.post(COMPLETIONS, json=body)
    assert response.json()["choices"][0]["text"].startswith(kept)
    assert engine.tokenizer.decode([*engine.calls[0][0]]) == kept


async def test_a_prompt_is_cut_to_what_fits(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"prompt": "x" * 500, "truncate_prompt_tokens": -1, "max_tokens": 28}
    assert (await client.post(COMPLETIONS, json=body)).status_code == 200
    chat = {"messages": [{"role": "user", "content": "x" * 500}], "truncate_prompt_tokens": -1}
    assert (await client.post(CHAT, json=chat)).status_code == 200
    assert [len(call[0]) for call in engine.calls] == [100, 127]
    response = await client.post(COMPLETIONS, json=body | {"truncate_prompt_tokens": 0})
    assert response.status_code == 400


async def test_only_the_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    choice = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
    assert choice["text"] == "abc"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
    stream = events(await client.post(COMPLETIONS, json=body | {"stream": True}))
    assert "".join(one["choices"][0]["text"] for one in stream) == "abc"
    whole = {"prompt": "x" * 128, "max_tokens": 0, "prompt_logprobs": 0}
    assert (await client.post(COMPLETIONS, json=whole)).json()["usage"]["completion_tokens"] == 0
    assert {call[1].max_tokens for call in engine.calls} == {0}


@pytest.mark.parametrize("body", [{"prompt": "abc"}, {"prompt": "abc", "echo": False}])
async def test_nothing_at_all_is_refused(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    response = await client.post(COMPLETIONS, json=body | {"max_tokens": 0})
    assert response.status_code == 400
    assert "echo or prompt_logprobs" in response.json()["error"]["message"]


async def test_an_echo_in_a_stream(client: httpx.AsyncClient) -> None:
    body = {"prompt": "abc", "max_tokens": 99, "echo": True, "stream": True, "logprobs": 0}
    chunks = events(await client.post(COMPLETIONS, json=body))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc" + TEXT
    tokens = [token for one in chunks for token in one["choices"][0]["logprobs"]["tokens"]]
    assert "".join(tokens) == "abc" + TEXT


async def test_token_ids_on_request(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer, prompt = engine.tokenizer.encode(TEXT), engine.tokenizer.encode("abc")
    body = {"prompt": ["abc", "b"], "max_tokens": 99, "return_token_ids": True}
    choices = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert choices[0]["token_ids"] == choices[1]["token_ids"] == answer
    assert choices[0]["prompt_token_ids"] == prompt
    chunks = events(await client.post(COMPLETIONS, json=body | {"stream": True, "prompt": "abc"}))
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [token for part in parts for token in part["token_ids"]] == answer
    assert [part.get("prompt_token_ids") for part in parts[:2]] == [prompt, None]


async def test_token_ids_of_chats(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = engine.tokenizer.encode(TEXT)
    body = {"messages": MESSAGES, "return_token_ids": True, "n": 2}
    whole = (await client.post(CHAT, json=body)).json()
    assert whole["prompt_token_ids"] == list(engine.calls[0][0])
    assert [choice["token_ids"] for choice in whole["choices"]] == [answer] * 2
    chunks = events(await client.post(CHAT, json=body | {"stream": True, "n": 1}))
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == answer
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert "prompt_token_ids" not in chunks[1]


@pytest.mark.parametrize(("path", "model", "body"), ROUTES)
async def test_usage_in_every_chunk(
    client: httpx.AsyncClient, path: str, model: type[GenerationRequest], body: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(
        await client.post(path, json=body | {"stream": True, "stream_options": options})
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 2
    prompt = {chunk["usage"]["prompt_tokens"] for chunk in chunks}
    assert len(prompt) == 1
    options = {"include_usage": False, "continuous_usage_stats": True}
    chunks = events(
        await client.post(path, json=body | {"stream": True, "stream_options": options})
    )
    assert not any(chunk["usage"] for chunk in chunks)


@pytest.mark.parametrize("reason", ["stop text", 7, 0])
@pytest.mark.parametrize(("path", "model", "body"), ROUTES)
async def test_what_stopped_an_answer(
    serving: Any, reason: str | int, path: str, model: object, body: dict[str, Any]
) -> None:
    async with serving(FakeEngine(stop_reason=reason)) as client:
        whole = (await client.post(path, json=body | {"max_tokens": 99})).json()
        assert whole["choices"][0]["stop_reason"] == reason
        chunks = events(await client.post(path, json=body | {"max_tokens": 99, "stream": True}))
        assert chunks[-1]["choices"][0]["stop_reason"] == reason
        assert "stop_reason" not in chunks[0]["choices"][0]


@pytest.mark.parametrize(("path", "model", "body"), ROUTES)
async def test_bodies_stay_as_they_are_where_nothing_new_is_asked(
    client: httpx.AsyncClient, path: str, model: object, body: dict[str, Any]
) -> None:
    whole = (await client.post(path, json=body)).json()
    assert set(whole) == {"id", "object", "created", "model", "choices", "usage", "metrics"}
    own = {"text"} if path == COMPLETIONS else {"message"}
    assert set(whole["choices"][0]) == {"index", "logprobs", "finish_reason"} | own
    for chunk in events(await client.post(path, json=body | {"stream": True})):
        assert set(chunk) == {"id", "object", "created", "model", "choices", "usage"}
        own = {"text"} if path == COMPLETIONS else {"delta"}
        assert set(chunk["choices"][0]) == {"index", "logprobs", "finish_reason"} | own
