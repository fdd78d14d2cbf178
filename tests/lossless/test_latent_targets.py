"""Targets with latent attention, also beside states: drafts change no token, and transformers says
the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.contracts.target_contract import (
    PLAIN,
    PROMPTS,
    RANDOM,
    check_answers,
    check_long_prompt,
    check_pipelined_trees,
    check_preempted,
    engine_of,
    params,
    token_ids,
)
from support.tools.tiny_models import VOCAB_SIZE, save_tiny_model
from support.tools.tiny_tokenizers import single_bytes
from transformers import AutoModelForCausalLM


def checkpoint(kind: str, folder: Path, **fields: Any) -> Path:
    save_tiny_model(kind, folder)
    single_bytes().save_pretrained(folder)
    config = folder / "config.json"
    found = json.loads(config.read_text()) | fields
    if kind == "kimi_linear":
        publish(folder, found)
    config.write_text(json.dumps(found))
    return folder


def publish(folder: Path, config: dict[str, Any]) -> None:
    """Give a checkpoint of Kimi Linear the fields and names of the published one."""
    types = config.pop("layer_types")
    numbers = {
        kind: [number + 1 for number, own in enumerate(types) if own == kind] for kind in set(types)
    }
    config["linear_attn_config"] = {
        "full_attn_layers": numbers["full_attention"],
        "kda_layers": numbers["linear_attention"],
        "head_dim": config.pop("linear_head_dim"),
        "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    del config["mlp_layer_types"]
    config |= {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "mla_use_nope": True}
    path, dense = folder / "model.safetensors", "model.layers.0.block_sparse_moe."
    tensors = {
        name.replace(dense, "model.layers.0.mlp."): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "num_stages"),
    [
        ("deepseek_v3", 2),
        ("kimi_linear", 1),
        pytest.param("deepseek_v3", 3, marks=pytest.mark.full),
        pytest.param("deepseek_v2", 1, marks=pytest.mark.full),
        pytest.param("glm4_moe_lite", 2, marks=pytest.mark.full),
        pytest.param("kimi_linear", 3, marks=pytest.mark.full),
        pytest.param("bailing_hybrid", 2, marks=pytest.mark.full),
    ],
)
def test_answers_are_those_of_transformers_with_drafts_and_without(
    kind: str, num_stages: int, tmp_path: Path
) -> None:
    folder = checkpoint(kind, tmp_path)
    peer = AutoModelForCausalLM.from_pretrained(folder).eval()
    with engine_of(folder, pipeline_parallel_size=num_stages) as engine:
        check_answers(engine, peer)


MORE = pytest.param("kimi_linear", marks=pytest.mark.full)


@pytest.mark.parametrize("kind", ["deepseek_v3", MORE])
def test_pipelined_trees(kind: str, tmp_path: Path) -> None:
    check_pipelined_trees(checkpoint(kind, tmp_path))


def test_preempted_requests(tmp_path: Path) -> None:
    check_preempted(checkpoint("deepseek_v3", tmp_path))


@pytest.mark.parametrize("kind", ["deepseek_v3", MORE])
def test_requests_that_begin_alike_share_latents(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(kind, tmp_path)
    begin, size = PROMPTS[2][:40], 16
    prompts = [begin + RANDOM.integers(2, VOCAB_SIZE, 30).tolist() for _ in range(3)]
    with engine_of(folder, enable_prefix_caching=False) as engine:
        wanted = [token_ids(engine.generate([one], params(0.8), PLAIN)) for one in prompts]
    with engine_of(folder) as engine:
        outputs = [engine.generate([one], params(0.8)) for one in prompts]
    assert [token_ids(own) for own in outputs] == wanted
    # Where states are kept, too, the second one makes the snapshot.
    cached = [own[0].metrics.cached_tokens for own in outputs]
    assert cached == [0, 0 if kind == "kimi_linear" else 2 * size, 2 * size]


@pytest.mark.parametrize("kind", [pytest.param("deepseek_v3", marks=pytest.mark.full), MORE])
def test_a_prompt_of_many_chunks(kind: str, tmp_path: Path) -> None:
    name = "model_max_length" if kind == "kimi_linear" else "max_position_embeddings"
    folder = checkpoint(kind, tmp_path, **{name: 8192})
    peer = AutoModelForCausalLM.from_pretrained(folder).eval()
    check_long_prompt(folder, peer)
