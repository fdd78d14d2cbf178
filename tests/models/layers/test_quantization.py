"""Weights of 8 bits and caches of FP8: what they keep, what they cost, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.errors import ConfigError
from draftline.kernels.dispatch import Machine, choose_for_fp8
from draftline.kernels.kv import kv_cache_kernels as paged_kv_ops
from draftline.kernels.kv import reference as kv_reference
from draftline.models.layers.linear_layers import PackedLinear, put_packed
from draftline.models.layers.model_slice import load_slice
from draftline.models.load.partition import LayerSpan
from draftline.models.load.rounding import rounded
from draftline.models.stage.load_stage import load_stage
from draftline.models.stage.options import StageOptions
from support.inputs.steps import BLOCK_SIZE, PagedRequest, make_step
from support.tools.tiny_models import save_tiny_model
from torch import nn

WHOLE = LayerSpan(0, 4, 4)
INT8 = StageOptions(quantization="int8")


def test_int8_rounds_to_127_steps_of_each_output() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 40) * torch.tensor([1e-3, 0.1, 1, 1, 10, 0])[:, None]
    model, x = nn.ModuleDict({"own": nn.Linear(40, 6, bias=False)}), torch.eye(40)
    put_packed(torch.float32)(model, "own.weight", rounded(weight, "int8"))
    layer = model["own"]
    assert isinstance(layer, PackedLinear)
    steps = weight.abs().amax(dim=1) / 127
    assert ((layer(x).T - weight).abs() <= 0.501 * steps[:, None]).all()
    layer.bias = nn.Parameter(torch.arange(6.0))
    torch.testing.assert_close(layer(x)[0] - layer.bias, layer(x).sub(layer.bias)[0])
    assert layer(torch.zeros(1, 40)).tolist() == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_linear_layers_of_decoder_layers_alone_are_rounded(kind: str, tmp_path: Path) -> None:
    folder = save_tiny_model(kind, tmp_path)
    exact, small = (load_slice(folder, WHOLE, "bfloat16", "cpu", q) for q in ("none", "int8"))
    for plain, layer in zip(exact.layers, small.layers, strict=True):
        assert not [one for one in layer.modules() if isinstance(one, nn.Linear)]
        quantized = [one for one in layer.modules() if isinstance(one, PackedLinear)]
        assert len(quantized) == 7
        assert {tensor.device.type for tensor in layer.parameters()} == {"cpu"}
        weights = [one.weight for one in plain.modules() if isinstance(one, nn.Linear)]
        kept_bytes = sum(one.weight.num_bytes for one in quantized)
        # Scales weigh more here than in a model of any use.
        assert kept_bytes < 0.65 * sum(weight.nbytes for weight in weights)
    assert isinstance(small.head, nn.Linear)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stage_of_int8_weights_answers_nearly_the_same(dtype: str, tmp_path: Path) -> None:
    folder = save_tiny_model("qwen2", tmp_path)
    exact = load_stage(folder, WHOLE, 8, BLOCK_SIZE)
    rounded = load_stage(folder, WHOLE, 8, BLOCK_SIZE, dtype, options=INT8)
    step = make_step([PagedRequest(range(8)).chunk(list(range(2, 22)), 0)])
    rows = np.arange(20, dtype=np.int32)
    found, expected = (stage.logits(step, None, rows) for stage in (rounded, exact))
    error = (found - expected).square().mean().sqrt()
    assert 0 < error < 0.05 * expected.std()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stages are on CPUs")
def test_an_fp8_cache_is_read_by_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton's interpreter loses the carry when it rounds to FP8.
    monkeypatch.setattr(paged_kv_ops, "write_kv", kv_reference.write_kv)
    folder = save_tiny_model("llama", tmp_path)
    exact = load_stage(folder, WHOLE, 8, BLOCK_SIZE)
    small = load_stage(folder, WHOLE, 8, BLOCK_SIZE, options=StageOptions(kv_cache_dtype="fp8"))
    assert small.kv.data.dtype == torch.float8_e4m3fn
    assert small.kv.data.nbytes * 4 == exact.kv.data.nbytes
    step = make_step([PagedRequest(range(8)).chunk(list(range(2, 12)), 0)])
    rows = np.arange(10, dtype=np.int32)
    found, expected = (stage.logits(step, None, rows) for stage in (small, exact))
    assert 0 < (found - expected).square().mean().sqrt() < 0.15 * expected.std()


@pytest.mark.parametrize(
    ("machine", "wanted", "hint"),
    [
        (Machine(None, has_triton=True, has_flash_attn=False), "auto", "it needs a GPU"),
        (Machine((9, 0), has_triton=True, has_flash_attn=True), "flash_attn", "attention is flash"),
        (Machine((9, 0), has_triton=False, has_flash_attn=True), "auto", "not installed"),
        (Machine((8, 6), has_triton=True, has_flash_attn=False), "auto", "below 8.9"),
    ],
)
def test_where_fp8_cannot_be_read_is_an_error(machine: Machine, wanted: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_dtype: cannot be fp8, .*{hint}"):
        choose_for_fp8(machine, wanted)


def test_where_fp8_can_be_read() -> None:
    machine = Machine((8, 9), has_triton=True, has_flash_attn=True)
    assert choose_for_fp8(machine).name == "triton"


@pytest.mark.parametrize("field", ["quantization", "kv_cache_dtype"])
def test_unknown_kinds_are_refused(field: str, tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    with pytest.raises(ConfigError, match=rf"^{field}: must be .*, not 'int3'"):
        load_stage(folder, WHOLE, 8, BLOCK_SIZE, options=StageOptions(**{field: "int3"}))
