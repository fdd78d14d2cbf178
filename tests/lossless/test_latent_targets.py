"""Targets with latent attention, also beside states: drafts change no token, and transformers says
the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.request.output import RequestOutput
from draftline.core.request.sampling_params import RequestOptions
from safetensors.torch import load_file, save_file
from support.tools.tiny_models import VOCAB_SIZE, save_tiny_model
from support.tools.tiny_tokenizers import single_bytes
from support.tools.transformers_peer import drawn, generated
from transformers import AutoModelForCausalLM

KINDS = ("prompt_lookup", "suffix", "spectra", "lookahead", "token_recycling", "anpd")
DRAFTERS = tuple(DrafterConfig(kind=kind) for kind in KINDS)
PLAIN = RequestOptions(speculative=False)
RANDOM = np.random.default_rng(5)
# The long ones take several steps.
PROMPTS = [RANDOM.integers(2, VOCAB_SIZE, count).tolist() for count in (1, 9, 70, 43)]
SEED, NUM_TOKENS = 3, 24


def params(temperature: float) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, seed=SEED, max_tokens=NUM_TOKENS, ignore_eos=True
    )


def engine_of(folder: Path, **settings: Any) -> Engine:
    given = {"drafters": DRAFTERS, "node_budget": "full", "max_num_batched_tokens": 32, **settings}
    return Engine(EngineConfig(model=str(folder), draft_deadline_ms=10_000, **given))


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(one.token_ids) for one in outputs]


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
        for temperature in (0.0, 0.8):
            plain = token_ids(engine.generate(PROMPTS, params(temperature), PLAIN))
            # The second time suffixes of the answers are known.
            outputs = [engine.generate(PROMPTS, params(temperature)) for _ in range(2)]
            assert [token_ids(own) for own in outputs] == [plain, plain]
            lengths = [n for one in outputs[-1] for n in one.metrics.accepted_lengths]
            assert np.mean(lengths) > 3
            for prompt, answer in zip(PROMPTS, plain, strict=True):
                if temperature:
                    assert drawn(peer, prompt, answer, temperature, SEED) == answer
                else:
                    assert generated(peer, prompt, NUM_TOKENS) == answer


MORE = pytest.param("kimi_linear", marks=pytest.mark.full)


@pytest.mark.parametrize("kind", ["deepseek_v3", MORE])
def test_pipelined_trees(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(kind, tmp_path)
    with engine_of(folder, pipeline_parallel_size=3, pipelined_trees="on") as engine:
        for prompt in PROMPTS[1:3]:
            for temperature in (0.0, 0.9):
                [plain] = engine.generate([prompt], params(temperature), PLAIN)
                for _ in range(2):
                    [drafted] = engine.generate([prompt], params(temperature))
                    assert drafted.token_ids == plain.token_ids
                assert np.mean(drafted.metrics.accepted_lengths) > 2


@pytest.mark.parametrize("kind", ["deepseek_v3", MORE])
def test_preempted_requests(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(kind, tmp_path)
    prompts = [*PROMPTS[1:], PROMPTS[2][::-1]]
    with engine_of(folder) as engine:
        wanted = token_ids(engine.generate(prompts, params(0.8), PLAIN))
    with engine_of(folder, kv_cache_tokens=144, max_num_seqs=3) as engine:
        for _ in range(2):
            outputs = engine.generate(prompts, params(0.8))
            assert token_ids(outputs) == wanted
            assert sum(one.metrics.num_preemptions for one in outputs)


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
    prompt = RANDOM.integers(2, VOCAB_SIZE, 5000).tolist()
    with engine_of(folder, max_num_batched_tokens=512, pipeline_parallel_size=2) as engine:
        [plain] = engine.generate([prompt], params(0.0), PLAIN)
        assert list(plain.token_ids) == generated(peer, prompt, NUM_TOKENS)
        [drafted] = engine.generate([prompt], params(0.0))
        assert drafted.token_ids == plain.token_ids
        assert drafted.metrics.cached_tokens == 4992
