"""Answers and streams of both endpoints over a fake engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import httpx
import pytest
from draftline.core.errors import CapacityError, StageError, StageLost
from draftline.core.request.sampling_params import RequestOptions
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.fakes.fake_engine import FakeEngine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TEXT = "def f(x):\n    return x\n"
MESSAGES = [{"role": "user", "content": "hi"}]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of every event before the closing one."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_completion_body(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 100, "seed": 7, "top_k": -1}
    response = await client.post(COMPLETIONS, json=body)
    assert response.status_code == 200
    answer = Completion.model_validate(response.json())
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, len(TEXT))
    prompt, params, options = engine.calls[0]
    assert engine.tokenizer.decode(prompt) == "abc"
    assert (params.seed, params.top_k, params.max_tokens) == (7, 0, 100)
    assert options == RequestOptions()


async def test_speculative_metrics(client: httpx.AsyncClient) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 6})
    block = response.json()["metrics"]["speculative_decoding"]
    assert block == {
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 1 / 3,
        "acceptance_histogram": [0, 2],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 2,
        "num_draft_tokens": 6,
        "acceptance": "coupled",
        "by_source": {"spectra": {"num_draft_tokens": 6, "num_accepted_tokens": 2}},
    }


async def test_completions_default_to_sixteen_tokens(client: httpx.AsyncClient) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": "abc"})
    assert response.json()["usage"]["completion_tokens"] == 16
    assert response.json()["choices"][0]["finish_reason"] == "length"


async def test_default_length_shrinks_with_the_room(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": "x" * 120})
    assert response.status_code == 200
    assert engine.calls[0][1].max_tokens == 8


async def test_several_prompts_keep_their_order(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = {"prompt": ["a", [1, 2], "ccc"], "max_tokens": 4}
    response = await client.post(COMPLETIONS, json=body)
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1, 2]
    assert response.json()["usage"]["prompt_tokens"] == 1 + 2 + 3
    assert sorted(len(call[0]) for call in engine.calls) == [1, 2, 3]


async def test_options_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"prompt": "a", "speculative": {"enabled": False}, "priority": 2, "cache_salt": "x"}
    assert (await client.post(COMPLETIONS, json=body)).status_code == 200
    assert engine.calls[0][2] == RequestOptions(speculative=False, priority=2, cache_salt="x")


@pytest.mark.parametrize(
    ("sent", "learned"),
    [({}, True), ({"store": True}, True), ({"store": None}, True), ({"store": False}, False)],
)
async def test_only_store_false_forbids_to_learn(
    client: httpx.AsyncClient, engine: FakeEngine, sent: dict[str, bool | None], learned: bool
) -> None:
    assert (await client.post(COMPLETIONS, json={"prompt": "a"} | sent)).status_code == 200
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert (await client.post("/v1/chat/completions", json=chat | sent)).status_code == 200
    assert [call[2].store for call in engine.calls] == [learned] * 2


async def test_completion_stream(client: httpx.AsyncClient) -> None:
    body = {"prompt": "a", "max_tokens": 100, "stream": True}
    chunks = events(await client.post(COMPLETIONS, json=body))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_usage_and_metrics_in_the_last_chunk(client: httpx.AsyncClient) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for path, body in ((COMPLETIONS, {"prompt": "abc"}), (CHAT, {"messages": MESSAGES})):
        chunks = events(await client.post(path, json=body | options))
        last = chunks[-1]
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] == (
            last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
        )
        assert last["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
        assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_stream_of_several_prompts(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 100, "stream": True}
    texts = {0: "", 1: ""}
    for chunk in events(await client.post(COMPLETIONS, json=body)):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: TEXT, 1: TEXT}


async def test_report_names_the_source_of_every_token(client: httpx.AsyncClient) -> None:
    body = {"prompt": "a", "max_tokens": 6, "speculative": {"report": True}}
    whole = (await client.post(COMPLETIONS, json=body)).json()["draftline"][0]
    assert whole["sources"] == ["spectra", "target"] * 3
    assert "".join(whole["texts"]) == TEXT[:6]
    chunks = events(await client.post(COMPLETIONS, json=body | {"stream": True}))
    for key in ("token_ids", "sources", "texts"):
        assert [item for chunk in chunks for item in chunk["draftline"][key]] == whole[key]


EXPLAINED = {"prompt": "a", "max_tokens": 6, "stream": True, "speculative": {"explain": True}}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_explained_stream_has_trees(client: httpx.AsyncClient, path: str) -> None:
    body = EXPLAINED | {"messages": MESSAGES}
    del body["messages" if path == COMPLETIONS else "prompt"]
    first, *chunks = [c for c in events(await client.post(path, json=body)) if "draftline" in c]
    assert "trees" not in first["draftline"]
    for chunk in chunks:
        ((tree,), texts) = chunk["draftline"]["trees"], chunk["draftline"]["texts"]
        assert [tree["texts"][node] for node in tree["path"]] == texts[:-1]
        assert tree["parents"] == [-1, -1, 1]
        assert tree["sources"] == ["suffix", "spectra", "spectra"]
        assert tree["values"] == [0.25, 0.5, 0.3333]
        assert tree["num_left_out"] == 0
        assert tree["asked"] == ["suffix", "spectra"]
        assert (tree["draft_s"], tree["verify_s"]) == (0.25, 0.5)


async def test_only_streams_are_explained(client: httpx.AsyncClient) -> None:
    answer = await client.post(COMPLETIONS, json=EXPLAINED | {"stream": False})
    assert (answer.status_code, "speculative.explain" in answer.text) == (400, True)
    body = {"input": "a", "stream": True, "speculative": {"explain": True}}
    answer = await client.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "speculative")


async def test_only_the_operator_sees_trees(serving: Any, engine: FakeEngine) -> None:
    tenant = {"name": "team", "key_sha256": hashlib.sha256(b"team").hexdigest()}
    async with serving(engine, api_keys=("operator",), tenants=(tenant,)) as client:
        for key, status in (("operator", 200), ("team", 403)):
            header = {"Authorization": f"Bearer {key}"}
            answer = await client.post(COMPLETIONS, json=EXPLAINED, headers=header)
            assert answer.status_code == status
        assert len(engine.calls) == 1


async def test_no_report_unless_asked(client: httpx.AsyncClient) -> None:
    body = {"prompt": "a", "stream": True}
    assert "draftline" not in (await client.post(COMPLETIONS, json=body)).text


async def test_chat_body(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": parts}]
    response = await client.post(CHAT, json={"messages": messages})
    answer = ChatCompletion.model_validate(response.json())
    assert answer.choices[0].message.content == TEXT
    prompt, params, _ = engine.calls[0]
    assert engine.tokenizer.decode(prompt) == "<system>be\n<user>h\ni\n<assistant>"
    assert params.max_tokens is None, "as many as fit is for the engine to know"


async def test_chat_stream(client: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES, "stream": True}
    chunks = events(await client.post(CHAT, json=body))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert not any("role" in delta for delta in deltas[1:])
    assert "".join(delta["content"] for delta in deltas) == TEXT


async def test_model_without_chat_template(serving: Any) -> None:
    async with serving(FakeEngine(chat=False)) as client:
        response = await client.post(CHAT, json={"messages": MESSAGES})
        assert response.status_code == 400
        assert "/v1/completions" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (CapacityError("the queue is full"), 429, "RateLimitError"),
        (StageLost("stage 1 died"), 503, "ServiceUnavailableError"),
        (StageError("step 3: secret detail"), 500, "InternalServerError"),
        (TimeoutError(), 408, "TimeoutError"),
        (ZeroDivisionError("secret detail"), 500, "InternalServerError"),
    ],
)
async def test_error_before_the_first_token(
    serving: Any, stream: bool, error: Exception, status: int, kind: str
) -> None:
    async with serving(FakeEngine(error=error)) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
        assert response.status_code == status
        assert response.json()["error"]["type"] == kind
        assert ("retry-after" in response.headers) == (status in (429, 503))
        assert "secret" not in response.text


async def test_error_inside_a_stream_is_one_event(serving: Any) -> None:
    engine = FakeEngine(error=StageLost("stage 1 died"), error_at=2)
    async with serving(engine) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": True})
        assert response.status_code == 200
        *chunks, last = events(response)
        assert len(chunks) == 2
        assert last["error"]["code"] == 503


async def test_one_failing_prompt_ends_the_others(serving: Any) -> None:
    engine = FakeEngine(max_running=2, hold=asyncio.Event())
    async with serving(engine) as client:
        response = await client.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]})
        assert response.status_code == 429
        assert len(engine.cancelled) == 2


async def test_the_deadline_counts_the_time_in_the_queue(serving: Any) -> None:
    class FullEngine(FakeEngine):
        """Never begins with a request."""

        async def stream(self, *_: Any, **__: Any) -> Any:
            await asyncio.Event().wait()
            yield

    async with serving(FullEngine(), request_timeout_s=0.05) as client:
        for stream in (False, True):
            response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
            assert response.status_code == 408


@pytest.mark.parametrize("stream", [False, True])
async def test_deadline(serving: Any, stream: bool) -> None:
    engine = FakeEngine(hold=asyncio.Event())
    async with serving(engine, request_timeout_s=0.05) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
        error = events(response)[-1] if stream else response.json()
        assert error["error"]["code"] == 408
        assert len(engine.cancelled) == 1
