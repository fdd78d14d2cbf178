"""Targets whose layers keep states: drafts change no token, and transformers says the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftline import AsyncEngine, DrafterConfig
from draftline.core.errors import ConfigError
from draftline.core.request.output import Delta
from safetensors.torch import load_file, save_file
from support.contracts.target_contract import (
    KINDS,
    PLAIN,
    PROMPTS,
    RANDOM,
    check_answers,
    check_drafts,
    check_long_prompt,
    check_pipelined_trees,
    check_preempted,
    config_of,
    engine_of,
    params,
    token_ids,
)
from support.tools.tiny_models import DELTA, SIZES, VOCAB_SIZE, save_tiny_model
from support.tools.tiny_tokenizers import single_bytes
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)


def kinds(*quick: str) -> list[Any]:
    """These kinds, and all others in `make test-full`."""
    kinds = (
        "qwen3_next", "qwen3_5", "qwen3_5_moe_text", "olmo_hybrid", "granitemoehybrid",
        "falcon_h1", "nemotron_h", "lfm2", "kimi_linear", "bailing_hybrid",
    )  # fmt: skip
    full = (pytest.param(kind, marks=pytest.mark.full) for kind in kinds if kind not in quick)
    return [*quick, *full]


def qwen3_5(folder: Path) -> Path:
    """A checkpoint as published: the text part of a composite model, and its `mtp` layer."""
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": SIZES["hidden_size"], "num_position_embeddings": 16,
    }  # fmt: skip
    config = AutoConfig.for_model("qwen3_5", text_config=SIZES | DELTA, vision_config=vision)
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    add_mtp(folder)
    return folder


def qwen3_next(folder: Path) -> Path:
    save_tiny_model("qwen3_next", folder)
    add_mtp(folder)
    return folder


def add_mtp(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"mtp.fc.weight": torch.zeros(2, 2), "mtp.layers.0.mlp.gate.weight": torch.zeros(1)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


MAKERS = {"qwen3_next": qwen3_next, "qwen3_5": qwen3_5}


def checkpoint(kind: str, folder: Path) -> Path:
    if kind in MAKERS:
        MAKERS[kind](folder)
    else:
        save_tiny_model(kind, folder)
    single_bytes().save_pretrained(folder)
    return folder


def peer_of(kind: str, folder: Path) -> PreTrainedModel:
    auto = AutoModelForImageTextToText if kind == "qwen3_5" else AutoModelForCausalLM
    return auto.from_pretrained(folder).eval()


@pytest.mark.parametrize(
    ("kind", "num_stages"),
    [
        ("qwen3_next", 1),
        ("qwen3_5", 3),
        pytest.param("qwen3_next", 3, marks=pytest.mark.full),
        pytest.param("qwen3_5_moe_text", 2, marks=pytest.mark.full),
        pytest.param("olmo_hybrid", 2, marks=pytest.mark.full),
        pytest.param("granitemoehybrid", 2, marks=pytest.mark.full),
        pytest.param("falcon_h1", 2, marks=pytest.mark.full),
        pytest.param("nemotron_h", 3, marks=pytest.mark.full),
        pytest.param("lfm2", 2, marks=pytest.mark.full),
    ],
)
def test_answers_are_those_of_transformers_with_drafts_and_without(
    kind: str, num_stages: int, tmp_path: Path
) -> None:
    folder = checkpoint(kind, tmp_path)
    with engine_of(folder, pipeline_parallel_size=num_stages) as engine:
        kept = engine.stats().stage_memory
        check_answers(engine, peer_of(kind, folder))
        # What it was given at the start is enough.
        assert engine.stats().stage_memory == kept
        assert any(memory.states for memory in kept)


@pytest.mark.parametrize("kind", kinds("qwen3_next"))
def test_trees_of_60_nodes(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(kind, tmp_path)
    drafters = [DrafterConfig(kind=own, max_nodes=60) for own in KINDS]
    wide = {"tree_nodes": 60, "drafters": drafters, "max_num_batched_tokens": 512}
    with engine_of(folder, **wide) as engine:
        kept = engine.stats().stage_memory
        for temperature in (0.0, 0.8):
            plain = token_ids(engine.generate(PROMPTS, params(temperature), PLAIN))
            # Each round drafts more, of what the rounds before it said.
            for _ in range(3):
                outputs = engine.generate(PROMPTS, params(temperature))
                assert token_ids(outputs) == plain
            metrics = [one.metrics for one in outputs]
            assert max(one.num_draft_tokens / one.num_steps for one in metrics) > 40
        assert engine.stats().stage_memory == kept


def test_pipelined_trees_go_on_from_nodes_in_flight(tmp_path: Path) -> None:
    check_pipelined_trees(checkpoint("qwen3_5", tmp_path))


@pytest.mark.parametrize("kind", kinds("qwen3_next"))
def test_a_preempted_request_computes_its_states_again(kind: str, tmp_path: Path) -> None:
    check_preempted(checkpoint(kind, tmp_path))


@pytest.mark.parametrize("kind", kinds("qwen3_5"))
def test_requests_that_begin_alike_go_on_from_a_snapshot(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(kind, tmp_path)
    # Two blocks and a half that all have, and more of their own.
    begin, size = PROMPTS[2][:40], 16
    prompts = [begin + RANDOM.integers(2, VOCAB_SIZE, 30).tolist() for _ in range(3)]
    prompts += [prompts[0], [*prompts[0][:-1], 5]]
    with engine_of(folder, enable_prefix_caching=False) as engine:
        wanted = [token_ids(engine.generate([one], params(0.8), PLAIN)) for one in prompts]
    with engine_of(folder, max_num_seqs=2) as engine:
        cached = []
        for prompt, answer in zip(prompts, wanted, strict=True):
            [one] = engine.generate([prompt], params(0.8))
            assert token_ids([one]) == answer
            cached.append(one.metrics.cached_tokens)
        # The second one makes the snapshot where texts part; there are no more than two.
        assert cached == [0, 0, 2 * size, 2 * size, 4 * size]
        # Together, one waits for the other.
        together = engine.generate([prompts[1][::-1]] * 2, params(0.8))
        assert {one.metrics.cached_tokens for one in together} == {0, 4 * size}
        assert together[0].token_ids == together[1].token_ids


@pytest.mark.parametrize("kind", kinds("qwen3_next"))
def test_a_prompt_of_many_chunks(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(kind, tmp_path)
    config = AutoConfig.from_pretrained(folder)
    config.get_text_config().max_position_embeddings = 8192
    config.save_pretrained(folder)
    check_long_prompt(folder, peer_of(kind, folder))


async def test_streams_that_are_left_give_their_slots_back(tmp_path: Path) -> None:
    engine = AsyncEngine(config_of(checkpoint("qwen3_next", tmp_path), max_num_seqs=2))
    await engine.start()
    try:
        wanted = [await engine.generate(one, params(0.8), PLAIN) for one in PROMPTS]
        long = replace(params(0.8), max_tokens=100)
        for prompt in PROMPTS:
            async with aclosing(engine.stream(prompt, long)) as deltas:
                await anext(deltas)
        streams = [engine.stream(one, params(0.8)) for one in PROMPTS]
        async with asyncio.timeout(60):
            found = await asyncio.gather(*map(streamed, streams))
        assert found == token_ids(wanted)
    finally:
        await engine.close()


async def streamed(deltas: AsyncIterator[Delta]) -> list[int]:
    return [token async for delta in deltas for token in delta.token_ids]


def test_stages_of_16_bits(tmp_path: Path) -> None:
    folder = checkpoint("qwen3_5", tmp_path)
    with engine_of(folder, dtype="bfloat16", pipeline_parallel_size=2) as engine:
        for temperature in (0.0, 0.8):
            check_drafts(engine, temperature)


def test_a_model_that_keeps_states_drafts_for_none(tmp_path: Path) -> None:
    folder = checkpoint("qwen3_next", tmp_path)
    drafter = DrafterConfig(kind="model", model=str(folder))
    with pytest.raises(ConfigError, match="keep states"):
        engine_of(folder, drafters=(drafter,)).close()
