"""A KV cache below the model's context: what fits is served, what never can is a 400."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from draftline import Engine, EngineConfig, SamplingParams
from draftline.core.errors import RequestError
from draftline.deploy.engine.async_engine import AsyncEngine

SLOTS = 64
PROMPT = "abcdefgh"
PARAMS = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)


def config(checkpoint: Path) -> EngineConfig:
    return EngineConfig(model=str(checkpoint), kv_cache_tokens=SLOTS, block_size=16)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine(config(checkpoint)) as engine:
        assert engine.max_model_len > SLOTS
        yield engine


def test_without_a_limit_an_answer_has_as_many_tokens_as_fit(engine: Engine) -> None:
    outputs = engine.generate([PROMPT, PROMPT, "xyz"], PARAMS)
    # They cannot all stand in the cache at once.
    assert [len(one.token_ids) for one in outputs] == [SLOTS - 8, SLOTS - 8, SLOTS - 3]
    assert [one.finish_reason for one in outputs] == ["length"] * 3
    assert outputs[0].token_ids == outputs[1].token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "field", "hint"),
    [
        (PROMPT, {"max_tokens": SLOTS - 7}, "max_tokens", f"at most {SLOTS - 8} fit"),
        (PROMPT, {"max_tokens": None, "min_tokens": 60}, "min_tokens", f"at most {SLOTS - 8} fit"),
        ("a" * SLOTS, {"max_tokens": None}, "prompt", f"KV cache of {SLOTS}"),
        ("a" * (SLOTS + 5), {"max_tokens": 1}, "prompt", f"has {SLOTS + 5} tokens"),
        ("a" * 300, {"max_tokens": None}, "prompt", f"KV cache of {SLOTS}"),
    ],
)
def test_what_can_never_fit_names_field_and_limit(
    engine: Engine, prompt: str, params: dict[str, Any], field: str, hint: str
) -> None:
    with pytest.raises(RequestError, match=hint) as caught:
        engine.generate([prompt], SamplingParams(**params))
    assert caught.value.field == field


def test_the_last_slot_is_used(engine: Engine) -> None:
    (output,) = engine.generate(["a" * (SLOTS - 1)], PARAMS)
    assert len(output.token_ids) == 1


@pytest.fixture
async def client(serving: Any, checkpoint: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(AsyncEngine(config(checkpoint))) as client:
        yield client


async def test_over_http(client: httpx.AsyncClient) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    response = await client.post("/v1/chat/completions", json=chat)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    assert usage["total_tokens"] == SLOTS
    response = await client.post("/v1/chat/completions", json=chat | {"max_tokens": SLOTS})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"
    for stream in (False, True):
        body = {"prompt": "a" * SLOTS, "max_tokens": 1, "stream": stream}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
