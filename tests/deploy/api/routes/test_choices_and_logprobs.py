"""`n`, `echo`, log-probabilities and structured answers, as clients spell and see them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from draftline.core.request.allowed_tokens import StructuredOutput
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.fakes.fake_engine import FakeEngine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
BODY = {"prompt": "abé", "max_tokens": 4}


async def post(client: httpx.AsyncClient, path: str, **fields: Any) -> Any:
    body = fields if "messages" in fields else BODY | fields
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_every_choice_has_a_seed_of_its_own(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = await post(client, COMPLETIONS, prompt=["ab", "cde"], n=3, seed=2**63 - 2)
    answer = Completion.model_validate(body)
    assert [choice.index for choice in answer.choices] == list(range(6))
    seeds = [(len(prompt), params.seed) for prompt, params, _ in engine.calls]
    assert sorted(seeds) == sorted(
        (size, seed) for size in (2, 3) for seed in (2**63 - 2, 2**63 - 1, 0)
    )
    # A prompt counts once, however many answers it gets.
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 24)


async def test_too_many_answers(client: httpx.AsyncClient) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": ["a"] * 200, "n": 2})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"


async def test_completion_logprobs(client: httpx.AsyncClient) -> None:
    answer = Completion.model_validate(await post(client, COMPLETIONS, logprobs=2))
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens == ["d", "e", "f", " "]
    assert found.token_logprobs == [-0.25] * 4
    assert found.text_offset == [0, 1, 2, 3]
    assert found.top_logprobs is not None
    # The two most probable tokens, and the chosen one beside them.
    assert [len(top) for top in found.top_logprobs] == [3] * 4
    assert found.top_logprobs[0]["d"] == -0.25


async def test_echo_begins_with_the_prompt_and_its_log_probabilities(
    client: httpx.AsyncClient,
) -> None:
    # As with OpenAI, null stands for what the first token does not have; its own type forbids it.
    choice = (await post(client, COMPLETIONS, echo=True, logprobs=1))["choices"][0]
    assert choice["text"] == "abédef "
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "\ufffd", "\ufffd", "d", "e", "f", " "]
    assert logprobs["token_logprobs"] == [None, *[-0.25] * 7]
    plain = Completion.model_validate(await post(client, COMPLETIONS, echo=True, prompt=[1, 2]))
    assert plain.choices[0].logprobs is None
    assert plain.choices[0].text.endswith("def ")


async def test_echo_in_a_stream(client: httpx.AsyncClient) -> None:
    response = await client.post(
        COMPLETIONS, json=BODY | {"echo": True, "stream": True, "logprobs": 0}
    )
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert "".join(chunk["text"] for chunk in chunks) == "abédef "
    offsets = [offset for chunk in chunks for offset in chunk["logprobs"]["text_offset"]]
    assert len(offsets) == 4 + 4
    assert offsets[-2:] == [5, 6]


async def test_prompt_logprobs_stand_beside_the_answer(client: httpx.AsyncClient) -> None:
    body = await post(client, COMPLETIONS, prompt_logprobs=1)
    first, *others = body["choices"][0]["prompt_logprobs"]
    assert first is None
    assert len(others) == 3
    assert {entry["logprob"] for entry in others[0].values()} == {-0.25, -1.0}
    chat = await post(client, CHAT, messages=MESSAGES, prompt_logprobs=0)
    assert chat["prompt_logprobs"][0] is None
    refused = await client.post(COMPLETIONS, json=BODY | {"prompt_logprobs": 1, "stream": True})
    assert refused.status_code == 400


async def test_chat_logprobs(client: httpx.AsyncClient) -> None:
    body = await post(client, CHAT, messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=3)
    logprobs = ChatCompletion.model_validate(body).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [token.token for token in logprobs.content] == ["d", "e", "f"]
    assert logprobs.content[0].bytes == [ord("d")]
    assert [top.logprob for top in logprobs.content[0].top_logprobs] == [-1.0, -2.0]
    response = await client.post(
        CHAT, json={"messages": MESSAGES, "logprobs": True, "stream": True, "max_tokens": 3}
    )
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: {")]
    parts = [ChatCompletionChunk.model_validate_json(line.removeprefix("data: ")) for line in lines]
    assert (
        sum(len(p.choices[0].logprobs.content or ()) for p in parts if p.choices[0].logprobs) == 3
    )
    refused = await client.post(CHAT, json={"messages": MESSAGES, "top_logprobs": 2})
    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_object"}},
            StructuredOutput(kind="json_object"),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "object"}},
                }
            },
            StructuredOutput(kind="json", value='{"type": "object"}'),
        ),
        (
            {"structured_outputs": {"json": {"type": "array"}}},
            StructuredOutput(kind="json", value='{"type": "array"}'),
        ),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            StructuredOutput(kind="choice", value='["a", "b"]'),
        ),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput(kind="regex", value="a+")),
    ],
)
async def test_forms_of_an_answer(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    fields: dict[str, Any],
    expected: StructuredOutput | None,
) -> None:
    await post(client, COMPLETIONS, **fields)
    assert engine.calls[-1][1].structured_output == expected


async def test_every_parameter_arrives(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    given = {
        "typical_p": 0.5, "min_tokens": 2, "repetition_penalty": 1.1, "presence_penalty": -1,
        "frequency_penalty": 0.5, "allowed_token_ids": [1, 2, 3], "banned_token_ids": [3],
    }  # fmt: skip
    await post(client, COMPLETIONS, logit_bias={"5": -3, "7": 2.5}, **given)
    params = engine.calls[-1][1]
    assert params.logit_bias == {5: -3, 7: 2.5}
    for name, value in given.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value)
