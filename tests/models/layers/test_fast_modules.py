"""Each replacement against the module it replaces, and the way without replacements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.steps import StepOutput
from draftline.models.layers import model_slice
from draftline.models.layers.fast_modules import (
    FastAttention,
    FastGatedMlp,
    FastLinear,
    FastRmsNorm,
    make_fast,
)
from draftline.models.load.partition import LayerSpan
from draftline.models.stage.load_stage import load_stage
from support.inputs.steps import BLOCK_SIZE, PagedRequest, make_step
from support.tools.tiny_models import KINDS, save_tiny_model
from transformers import AutoModelForCausalLM

TOKENS = np.random.default_rng(3).integers(2, 97, 30).tolist()


def close(ours: torch.Tensor, theirs: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_norms_and_feed_forward_blocks_equal_their_originals(kind: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(KINDS[kind].config())
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    x = torch.randn(5, 32)
    norm, mlp = model.model.norm, model.model.layers[0].mlp
    with_eps = torch.randn(5, 32) * 1e-4
    wanted = norm(x), norm(with_eps), mlp(x)
    fast_norm, fast_mlp = make_fast(norm), make_fast(mlp)
    assert isinstance(fast_norm, FastRmsNorm)
    assert isinstance(fast_mlp, FastGatedMlp)
    close(fast_norm(x), wanted[0])
    close(fast_norm(with_eps), wanted[1])
    close(fast_mlp(x), wanted[2])
    close(FastLinear(model.lm_head)(x), model.lm_head(x))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_equal_the_unreplaced_ones_through_the_attention_interface(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(kind, tmp_path)
    num_layers = KINDS[kind].config().num_hidden_layers
    span = LayerSpan(0, num_layers, num_layers)
    fast = load_stage(tmp_path, span, 10, BLOCK_SIZE)
    monkeypatch.setattr(model_slice, "can_be_fast", lambda *_: False)
    plain = load_stage(tmp_path, span, 10, BLOCK_SIZE)
    assert isinstance(fast.path.part.layers[0].self_attn, FastAttention)
    assert not isinstance(plain.path.part.layers[0].self_attn, FastAttention)
    request = PagedRequest([2, 9, 4, 1, 7, 3, 5, 8])
    prompt = make_step([request.chunk(TOKENS[:20], 0)])
    tree = make_step([request.tree([5, 6, 7, 8], [-1, 0, 0, 1], 20)])
    for step in (prompt, tree):
        rows = np.arange(len(step.token_ids))
        close(fast.logits(step, None, rows), plain.logits(step, None, rows), atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_bfloat16_runs_the_original_modules(kind: str, tmp_path: Path) -> None:
    save_tiny_model(kind, tmp_path)
    stage = load_stage(tmp_path, LayerSpan(0, 4, 4), 10, BLOCK_SIZE, "bfloat16")
    assert stage.kv.data.dtype == torch.bfloat16
    step = make_step([PagedRequest([2, 9, 4, 1, 7]).chunk(TOKENS[:20], 0)])
    with torch.no_grad():
        peer = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
        )
        theirs = peer(torch.tensor([TOKENS[:20]])).logits[0].float()
    ours = stage.logits(step, None, np.arange(20))
    # bfloat16 keeps 8 bits; logits are about 5.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.2)
    output = stage.run(step)
    assert isinstance(output, StepOutput)
    assert output.target_tokens.dtype == np.int32
