"""Layers of a stage on a GPU, with the kernels interpreted: fused ones answer as others do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.models.attention.backend import choose_backend
from draftline.models.layers import linear_layers
from draftline.models.layers.linear_layers import GpuHead, GpuPackedLinear, sum_exactly
from draftline.models.layers.model_slice import load_slice
from draftline.models.load.partition import LayerSpan
from draftline.models.stage.plain_path import PlainPath, make_kv
from draftline.models.stage.stage import Stage
from support.inputs.steps import BLOCK_SIZE, PagedRequest, make_step
from support.tools.tiny_models import VOCAB_SIZE, save_tiny_model
from torch import nn

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interprets kernels")


def fused_stage(
    folder: Path, num_layers: int, dtype: str = "float32", *, quantization: str = "none"
) -> Stage:
    span = LayerSpan(0, num_layers, num_layers)
    part = load_slice(folder, span, dtype, quantization=quantization, fused=True)
    kv = make_kv(part, 12, BLOCK_SIZE)
    backend, _ = choose_backend(kv, part.dtype, BLOCK_SIZE, 4, "triton")
    return Stage(PlainPath(part, kv, BLOCK_SIZE, backend))


@pytest.mark.parametrize("runs_triton", [False, True])
def test_fused_8_bit_layers_answer_as_those_that_are_not(
    runs_triton: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model("qwen2", tmp_path, num_layers=2)
    with monkeypatch.context() as patch:
        patch.setattr(linear_layers, "runs_triton", lambda _: runs_triton)
        ours = fused_stage(folder, 2, quantization="int8")
    assert isinstance(ours.path.part.layers[0].self_attn.project, GpuPackedLinear)
    part = load_slice(folder, LayerSpan(0, 2, 2), quantization="int8")
    theirs = Stage(PlainPath(part, make_kv(part, 12, BLOCK_SIZE), BLOCK_SIZE))
    step = make_step([PagedRequest(range(6)).chunk(list(range(2, 11)), 0)])
    rows = np.arange(9, dtype=np.int32)
    found, expected = (stage.logits(step, None, rows) for stage in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_rows", [3, 70])
def test_logits_are_not_rounded_to_the_stages_dtype(num_rows: int, tmp_path: Path) -> None:
    """Rounded, logits of one row would be alike all over; few rows and many are alike."""
    folder = save_tiny_model("llama", tmp_path, num_layers=1)
    stage = fused_stage(folder, 1, "bfloat16")
    head, norm = stage.path.part.head, stage.path.part.norm
    assert isinstance(head, GpuHead)
    assert isinstance(norm, nn.Module)
    states = torch.randn(num_rows, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits = head(norm(states))
    assert logits.dtype == torch.float32
    assert logits.shape == (num_rows, VOCAB_SIZE)
    exact = norm(states).double() @ head.weight.double().t()
    assert (logits - exact).abs().max() < 1e-5
    assert (logits.bfloat16().float() - logits).abs().max() > 1e-4


def test_products_of_16_bits_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(matmul, name) for name in names]
    try:
        sum_exactly()
        assert [getattr(matmul, name) for name in names] == [False, False]
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, value)
