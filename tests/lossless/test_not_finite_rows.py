"""A model with a token whose embedding is not finite: requests that hold it end with an error, and
those that run beside them have their right text."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from draftline import DrafterConfig
from safetensors.torch import load_file, save_file
from support.servers.api_in_process import DRAFTERS, serving
from support.tools.cpu_kernels import load_cpu_kernels
from support.tools.tiny_models import save_tiny_model
from support.tools.tiny_tokenizers import single_bytes

BAD, NUM_TOKENS = 90, 24
BAD_PROMPT = [7, 9, BAD, 12, 7, 9, 12, 7, 9]
GOOD_PROMPTS = ([5, 9, 33, 17, 5, 9, 33, 17, 5], [70, 2, 41, 70, 2], [3] * 40, [8])
SIZES = {"max_model_len": 128, "kv_cache_tokens": 2048}


def save(folder: Path, value: float) -> Path:
    save_tiny_model("qwen2", folder, num_layers=2)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD] = value
    # No answer comes to the token by itself.
    tensors["lm_head.weight"][BAD] = 0.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    single_bytes().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), torch.nan)


async def post(client: httpx.AsyncClient, prompt: list[int], **fields: Any) -> httpx.Response:
    body = {
        "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True,
        "logprobs": 1, "seed": 3, **fields,
    }  # fmt: skip
    return await client.post("/v1/completions", json=body)


async def counted(client: httpx.AsyncClient) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    name = "draftline:not_finite_requests_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


WAYS: dict[str, dict[str, Any]] = {
    "drafts": {},
    "two stages": {"pipeline_parallel_size": 2},
    "plain": {"drafters": ()},
    "rejection": {"acceptance": "rejection"},
}


@pytest.mark.parametrize("way", WAYS)
async def test_the_others_have_their_text(folder: Path, way: str) -> None:
    async with serving(folder, **SIZES, compile="off", **WAYS[way]) as client:
        await check_all(client, {})
        # Under this rule a sampled text is one of the right distribution.
        if way != "rejection":
            await check_all(client, {"temperature": 0.9, "top_p": 0.9, "top_k": 5})


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
async def test_infinities_are_as_bad(value: float, tmp_path: Path) -> None:
    async with serving(save(tmp_path, value), **SIZES, compile="off") as client:
        await check_all(client, {})


@pytest.mark.compiler
@pytest.mark.parametrize("drafters", [DRAFTERS, ()])
async def test_the_others_have_their_text_by_cpu_kernels(
    folder: Path, drafters: tuple[DrafterConfig, ...]
) -> None:
    """Without drafts and log-probabilities they decode several tokens a step."""
    load_cpu_kernels()
    own = {"compile": "auto", "drafters": drafters}
    async with serving(folder, **SIZES, **own) as client:
        await check_all(client, {"logprobs": None})
        await check_all(client, {"logprobs": None, "temperature": 0.2})


async def check_all(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    before = await counted(client)
    # The bad ones come first, and have the first slots of the cache.
    prompts = (BAD_PROMPT, *GOOD_PROMPTS, BAD_PROMPT)
    answers = await asyncio.gather(*(post(client, one, **fields) for one in prompts))
    for bad in (answers[0], answers[-1]):
        assert bad.status_code == 500
        assert "not finite" in bad.json()["error"]["message"]
    for answer, prompt in zip(answers[1:-1], GOOD_PROMPTS, strict=True):
        alone = await post(client, prompt, **fields)
        assert (answer.status_code, alone.status_code) == (200, 200)
        assert answer.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]
    assert await counted(client) == before + 2


async def test_a_stream_ends_with_an_error_event(folder: Path) -> None:
    """Once it has begun: here the token is the first one of the answer."""
    async with serving(folder, **SIZES) as client:
        bias = {"logit_bias": {str(BAD): 100}, "logprobs": None}
        answer = await post(client, GOOD_PROMPTS[0], stream=True, **bias)
        assert answer.status_code == 200
        lines = [line for line in answer.text.split("\n\n") if line.startswith("data: {")]
        first, *_, last = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert first["choices"][0]["text"] == single_bytes().decode([BAD])
        assert last["error"]["code"] == 500
        assert "not finite" in last["error"]["message"]
        before_any = await post(client, BAD_PROMPT, stream=True)
        assert before_any.status_code == 500
        assert await counted(client) == 2


async def test_whatever_is_wanted_beside(folder: Path) -> None:
    wanted: list[dict[str, Any]] = [
        {"echo": True, "max_tokens": 0}, {"prompt_logprobs": 1}, {"logit_bias": {"7": 5}},
        {"repetition_penalty": 1.3, "temperature": 0.8, "top_k": 5}, {"n": 2},
    ]  # fmt: skip
    async with serving(folder, **SIZES) as client:
        for fields in wanted:
            answer = await post(client, BAD_PROMPT, **fields)
            assert answer.status_code == 500, fields
            good = await post(client, GOOD_PROMPTS[0], **fields)
            assert good.status_code == 200, good.text
        # Of the last one the second answer may be cancelled before it comes to this.
        assert await counted(client) in {len(wanted), len(wanted) + 1}
