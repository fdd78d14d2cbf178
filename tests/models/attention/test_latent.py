"""Layers that attend to latents, beside transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.errors import ConfigError
from draftline.models.attention.latent import latent_heads
from draftline.models.layers.weight_memory import read_weight_memory
from draftline.models.load.partition import LayerSpan
from draftline.models.stage.load_stage import load_stage
from draftline.models.stage.options import StageOptions
from draftline.models.stage.stage import Stage
from support.inputs.quantized_checkpoints import FORMATS, save_pair
from support.inputs.steps import BLOCK_SIZE, PagedRequest, make_step
from support.tools.tiny_models import LATENT, SIZES, VOCAB_SIZE, save_tiny_model
from transformers import AutoModelForCausalLM

LAYERS = SIZES["num_hidden_layers"]
NUM_BLOCKS = 60
TEXT = np.random.default_rng(0).integers(2, VOCAB_SIZE, 210).astype(int).tolist()


def stage_of(folder: Path, **options: str) -> Stage:
    span = LayerSpan(0, LAYERS, LAYERS)
    return load_stage(folder, span, NUM_BLOCKS, BLOCK_SIZE, options=StageOptions(**options))


def logits(stage: Stage, request: PagedRequest, first: int, last: int) -> np.ndarray:
    step = make_step([request.chunk(TEXT[first:last], first)])
    return stage.logits(step, None, np.arange(last - first)).numpy()


@pytest.mark.parametrize(
    "attention", ["sdpa", pytest.param("triton", marks=pytest.mark.full)]
)  # fmt: skip
def test_chunks_of_any_size_give_the_logits_of_transformers(attention: str, tmp_path: Path) -> None:
    folder = save_tiny_model("deepseek_v3", tmp_path)
    peer = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        expected = peer(torch.tensor([TEXT])).logits[0].numpy()
    stage = stage_of(folder, attention=attention)
    request = PagedRequest(range(NUM_BLOCKS))
    bounds = ((0, 100), (100, 101), (101, 150), (150, 210))
    found = [logits(stage, request, *own) for own in bounds]
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-4)
    width = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    assert stage.kv_bytes == LAYERS * NUM_BLOCKS * BLOCK_SIZE * width * 4


def test_what_makes_keys_of_latents_is_not_rounded(tmp_path: Path) -> None:
    # Without experts, among which rounding may choose.
    folder = save_tiny_model("minicpm3", tmp_path)
    stages = [stage_of(folder, quantization=kind) for kind in ("none", "int8")]
    for own, other in zip(*(stage.path.part.layers for stage in stages), strict=True):
        ours, theirs = (latent_heads(layer.get_submodule("self_attn")) for layer in (own, other))
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    exact, rounded = (logits(stage, PagedRequest(range(NUM_BLOCKS)), 0, 50) for stage in stages)
    error = np.abs(exact - rounded).max() / np.abs(exact).max()
    assert 1e-5 < error < 0.1
    weight = "model.layers.0.self_attn.{}_b_proj.weight"
    sizes = read_weight_memory(folder).sizes
    assert sizes["int8"][weight.format("kv")] == sizes["none"][weight.format("kv")]
    assert sizes["int8"][weight.format("q")] < sizes["none"][weight.format("q")] / 2


def test_they_are_not_kept_in_fp8(tmp_path: Path) -> None:
    folder = save_tiny_model("deepseek_v3", tmp_path)
    with pytest.raises(ConfigError, match="cannot be fp8"):
        stage_of(folder, kv_cache_dtype="fp8")


def test_a_checkpoint_of_fp8_blocks(tmp_path: Path) -> None:
    """As DeepSeek-V3 is published."""
    pair = save_pair("deepseek_v3", FORMATS["fp8 blocks"], tmp_path)
    found = [
        logits(stage_of(folder), PagedRequest(range(NUM_BLOCKS)), 0, 50)
        for folder in (pair.plain, pair.quantized)
    ]
    np.testing.assert_array_equal(*found)
