"""Stages keep the experts of mixtures as they are stored, with the answers of their values."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from draftline.benchmarks.peers import gguf_file
from draftline.core.errors import CheckpointError
from draftline.models.layers import experts as kept_experts
from draftline.models.layers.experts import CpuExperts, KeptExperts
from draftline.models.layers.model_slice import load_whole_model
from draftline.models.layers.weight_memory import read_weight_memory
from draftline.models.load.checkpoint import read_config
from draftline.models.load.partition import LayerSpan
from draftline.models.load.rounding import rounded
from draftline.models.stage.load_stage import load_stage
from draftline.models.stage.options import StageOptions
from draftline.models.stage.stage import Stage
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from support.inputs.gguf_blocks import random_blocks, unpacked_pair
from support.inputs.mxfp4_checkpoint import save_mxfp4_pair
from support.inputs.quantized_checkpoints import FORMATS, quantize, save_pair
from support.inputs.steps import BLOCK_SIZE
from support.tools.cpu_kernels import FOLDER, load_cpu_kernels
from support.tools.kept_weights import assert_alike, kept, logits
from support.tools.tiny_models import save_tiny_model
from torch import Tensor, nn

pytestmark = pytest.mark.compiler

FULL = pytest.mark.full
EXPERTS = "experts_kept"
# How the experts of each layer are kept.
KEPT = [
    ("gptq 4", "uint4:4"),
    pytest.param("gptq 8", "int8:4", marks=FULL),
    ("gptq 4, act order", "uint4:4"),
    ("awq", "uint4:4"),
    ("fp8 blocks", "float8_e4m3fn:4"),
    pytest.param("fp8 static", "float8_e4m3fn:4", marks=FULL),
    ("compressed fp8 channel", "float8_e4m3fn:4"),
    ("compressed int8", "int8:4"),
    pytest.param("compressed int8 asymmetric", "int8:4", marks=FULL),
    ("packed 4", "uint4:4"),
    pytest.param("packed 4, asymmetric", "uint4:4", marks=FULL),
]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    load_cpu_kernels()


def stage_of(folder: Path, quantization: str = "none", *, compiled: bool = True) -> Stage:
    options = StageOptions(
        compile="auto" if compiled else "off", compile_cache=str(FOLDER), quantization=quantization
    )
    count = read_config(folder).num_hidden_layers
    return load_stage(folder, LayerSpan(0, count, count), 8, BLOCK_SIZE, options=options)


def experts(stage: Stage) -> list[nn.Module]:
    modules = [module for layer in stage.path.part.layers for module in layer.modules()]
    return [module for module in modules if isinstance(module, CpuExperts | KeptExperts)]


def answers(stage: Stage) -> list[torch.Tensor]:
    """Of the experts of each layer, to the same rows."""
    torch.manual_seed(0)
    x, shares = torch.randn(9, stage.path.part.config.hidden_size), torch.rand(9, 2)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    return [module(x, chosen, shares) for module in experts(stage)]


def check_same(small: Stage, wide: Stage, kinds: str, atol: float = 1e-5) -> None:
    """Experts as `assert_alike` says; other layers are torch's, whose sums depend on where weights
    lie."""
    assert len(experts(small)) == len(experts(wide)) > 0
    assert small.memory.weights < wide.memory.weights
    for found, expected in zip(answers(small), answers(wide), strict=True):
        assert_alike(found, expected, kinds, atol)
    torch.testing.assert_close(logits(small), logits(wide), rtol=0, atol=atol)
    torch.testing.assert_close(logits(small, 20, 1), logits(wide, 20, 1), rtol=0, atol=atol)


@pytest.mark.parametrize(("form", "kinds"), KEPT)
def test_experts_stay_small_and_answers_are_those_of_the_values(
    form: str, kinds: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = save_pair("qwen3_moe", FORMATS[form], tmp_path)
    with caplog.at_level(logging.INFO):
        small, wide = stage_of(pair.quantized), stage_of(pair.plain)
    assert kept(caplog, EXPERTS) == [kinds, "float32:4"]
    check_same(small, wide, kinds)
    # Those of attention.
    [linears] = [line for line in caplog.messages if "quantized_weights_kept" in line]
    assert linears.endswith(f"weights='{kinds.partition(':')[0]}:16'")


@pytest.mark.parametrize("form", ["fp8 blocks", "fp8 static"])
@pytest.mark.parametrize("compiled", [True, False])
def test_experts_in_one_tensor_stay_small(
    form: str, *, compiled: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With blocks, or a scale for each expert."""
    source = save_tiny_model("qwen3_moe", tmp_path / "source", sizes={"moe_intermediate_size": 48})
    pair = quantize(source, FORMATS[form], tmp_path, merged=True)
    with caplog.at_level(logging.INFO):
        small, wide = (stage_of(one, compiled=compiled) for one in (pair.quantized, pair.plain))
    assert kept(caplog, EXPERTS)[0] == ("float8_e4m3fn:4" if compiled else "e4m3:4")
    torch.testing.assert_close(logits(small), logits(wide), rtol=0, atol=1e-5)
    if compiled:
        check_same(small, wide, "float8_e4m3fn")
        expected = read_weight_memory(pair.quantized).num_bytes()
        assert expected < read_weight_memory(pair.plain).num_bytes() / 2
    found, values = (load_whole_model(one).state_dict() for one in (pair.quantized, pair.plain))
    torch.testing.assert_close(found, values, rtol=0, atol=0)


# As llama.cpp mixes them, the kind of most and that of the second product. Of 256 inputs, of which
# blocks of K kinds are.
@pytest.mark.parametrize(
    ("kind", "most", "second", "kinds"),
    [
        ("qwen2_moe", "Q8_0", "Q8_0", "int8:2"),
        ("qwen3_moe", "Q4_0", "Q4_1", "uint4:2"),
        ("qwen3_moe", "Q4_K", "Q6_K", "int8+uint4:2"),
    ],
)
def test_experts_of_gguf_files_stay_small(
    kind: str, most: str, second: str, kinds: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    sizes = dict.fromkeys(("hidden_size", "moe_intermediate_size"), 256)
    if kind == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = 256
    sizes |= {"head_dim": 64, "vocab_size": 4096}
    source = save_tiny_model(kind, tmp_path / "source", num_layers=2, sizes=sizes)
    if "K" in most:
        monkeypatch.setattr(gguf_file, "quantize", random_blocks)
    others = {"experts.down_proj.weight": GGMLQuantizationType[second]}
    folder, plain = unpacked_pair(source, most, others)
    with caplog.at_level(logging.INFO):
        small, wide = stage_of(folder), stage_of(plain)
        by_torch = stage_of(folder, compiled=False)
    assert kept(caplog, EXPERTS)[:2] == [kinds, "float32:2"]
    check_same(small, wide, kinds, 2e-4)
    torch.testing.assert_close(logits(by_torch), logits(wide), rtol=0, atol=2e-4)
    assert 0.8 < small.memory.weights / read_weight_memory(folder).num_bytes() < 1.05


def test_mxfp4_stays_in_4_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = save_mxfp4_pair(tmp_path)
    with caplog.at_level(logging.INFO):
        small, wide = stage_of(pair.quantized), stage_of(pair.plain)
        by_torch = stage_of(pair.quantized, compiled=False)
    assert kept(caplog, EXPERTS) == ["float4_e2m1fn_x2:2", "bfloat16:2", "e2m1:2"]
    check_same(small, wide, "float4_e2m1fn_x2")
    torch.testing.assert_close(logits(by_torch), logits(wide), rtol=0, atol=1e-5)


# Experts without gates are in the long run.
@pytest.mark.parametrize(
    ("kind", "count"),
    [("mixtral", 4), ("deepseek_v3", 3), pytest.param("nemotron_h", 1, marks=FULL)],
)
def test_experts_of_other_names_and_after_dense_layers(
    kind: str, count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = save_pair(kind, FORMATS["fp8 blocks"], tmp_path)
    with caplog.at_level(logging.INFO):
        small, wide = stage_of(pair.quantized), stage_of(pair.plain)
    assert kept(caplog, EXPERTS) == [f"float8_e4m3fn:{count}", f"float32:{count}"]
    check_same(small, wide, "float8_e4m3fn")


@pytest.mark.parametrize(("kind", "kinds"), [("int8", "int8:4"), ("int4", "uint4:4")])
def test_experts_are_rounded(
    kind: str, kinds: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = save_tiny_model("qwen3_moe", tmp_path)
    with caplog.at_level(logging.INFO):
        small = stage_of(source, kind)
    assert kept(caplog, EXPERTS) == [kinds]
    weights = load_file(source / "model.safetensors")
    for name in weights:
        if ".experts." in name:
            weights[name] = rounded(weights[name], kind).dequantized(torch.float32)
    save_file(weights, source / "model.safetensors")
    for found, expected in zip(answers(small), answers(stage_of(source)), strict=True):
        assert_alike(found, expected, kinds, 1e-5)


@pytest.mark.parametrize("form", ["gptq 4", "fp8 blocks"])
def test_without_a_compiler_torch_multiplies_by_what_is_kept(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = save_pair("qwen3_moe", FORMATS[form], tmp_path)
    with caplog.at_level(logging.INFO):
        small = stage_of(pair.quantized, compiled=False)
    assert kept(caplog, EXPERTS) == [{"gptq 4": "uint4:4", "fp8 blocks": "e4m3:4"}[form]]
    expected = logits(stage_of(pair.plain, compiled=False))
    torch.testing.assert_close(logits(small), expected, rtol=0, atol=1e-5)


def test_experts_of_several_kinds_are_widened_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left_out = tuple(
        f"model.layers.1.mlp.experts.{expert}.{name}_proj"
        for expert, name in ((0, "up"), (2, "down"))
    )
    pair = save_pair("qwen3_moe", FORMATS["gptq 4"], tmp_path, keep=left_out)
    with caplog.at_level(logging.INFO):
        small, wide = stage_of(pair.quantized), stage_of(pair.plain)
    assert kept(caplog, EXPERTS) == ["uint4:3 float32:1", "float32:4"]
    check_same(small, wide, "uint4")


def test_experts_that_are_called_in_another_way_are_widened_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = save_tiny_model("llama4_text", tmp_path)
    with caplog.at_level(logging.INFO):
        stage = stage_of(source, "int8")
    assert not experts(stage)
    # Its routers, which are linear layers and more, are not rounded.
    assert logits(stage).isfinite().all()
    [said] = [line for line in caplog.messages if "experts_widened" in line]
    assert "layers=4 reason='they are called in a way of their own'" in said


@pytest.mark.parametrize("form", ["gptq 4", "fp8 blocks", None])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_memory_is_that_of_what_is_kept(
    form: str | None, quantization: str, tmp_path: Path
) -> None:
    """But for what fills up last panels and tiles, and the group of each input."""
    source = tmp_path / "source"
    wide = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128}
    save_tiny_model("qwen3_moe", source, sizes=wide)
    folder = source if form is None else quantize(source, FORMATS[form], tmp_path).quantized
    stage = stage_of(folder, quantization)
    expected = read_weight_memory(folder).num_bytes(quantization)
    assert 1 <= stage.memory.weights / expected < 1.05


def test_memory_of_mxfp4_and_of_experts_that_are_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_mxfp4_pair(tmp_path).quantized
    memory = read_weight_memory(folder)
    sizes = {name: size for name, size in memory.sizes["none"].items() if "experts" in name}
    # A half of a byte, and a scale of a byte for 32.
    numel = 2 * 4 * 3 * 32 * 64
    assert sum(size for name, size in sizes.items() if "bias" not in name) == numel * 17 // 32
    assert memory.widened is None
    monkeypatch.setattr(kept_experts, "expert_obstacle", lambda _: "they are of no kind")
    widened = read_weight_memory(folder)
    assert widened.widened == "they are of no kind"
    assert widened.num_bytes() - memory.num_bytes() == numel * 4 - numel * 17 // 32


def edited(form: str, folder: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> Path:
    """A quantised checkpoint with another tensor `name`, or without it."""
    path = save_pair("qwen3_moe", FORMATS[form], folder).quantized
    tensors = load_file(path / "model.safetensors")
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.contiguous()
    save_file(tensors, path / "model.safetensors")
    return path


FIRST = "model.layers.1.mlp.experts.0."


@pytest.mark.parametrize(
    ("form", "part", "change", "reason"),
    [
        ("gptq 4", "up_proj.scales", None, rf"tensor {FIRST}up_proj.scales missing"),
        ("fp8 blocks", "up_proj.weight_scale_inv", lambda one: one.repeat(3, 1),
         rf"tensors of {FIRST}up_proj do not fit each other: scales \(3, 1\)"),
        ("awq", "down_proj.scales", lambda one: one * torch.nan, "a scale is not finite"),
        ("packed 4", "gate_proj.weight_shape", lambda one: one + 8, "is not a weight"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_named(
    form: str, part: str, change: Callable[[Tensor], Tensor | None] | None, reason: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    folder = edited(form, tmp_path, f"{FIRST}{part}", change or (lambda _: None))
    with pytest.raises(CheckpointError, match=reason):
        stage_of(folder)


def test_merged_scales_that_do_not_fit_are_named(tmp_path: Path) -> None:
    source = save_tiny_model("qwen3_moe", tmp_path / "source")
    folder = quantize(source, FORMATS["fp8 blocks"], tmp_path, merged=True).quantized
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"].repeat(1, 3, 1)
    save_file(tensors, folder / "model.safetensors")
    reason = rf"tensors of {name} do not fit each other: scales \(3, 1\)"
    with pytest.raises(CheckpointError, match=reason):
        stage_of(folder)
    tensors.pop(f"{name}_scale_inv")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {name} is \S+e4m3fn and has no scale"):
        stage_of(folder)


def test_missing_experts_and_wrong_shapes_are_named(tmp_path: Path) -> None:
    source = save_tiny_model("qwen3_moe", tmp_path)
    tensors = load_file(source / "model.safetensors")
    whole = dict(tensors)
    tensors.pop(f"{FIRST}up_proj.weight")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"of 4 experts, and there are matrices of 4 and 3"):
        stage_of(source)
    whole[f"{FIRST}down_proj.weight"] = torch.zeros(32, 8)
    save_file(whole, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"shapes \(32, 8\), the config says \(32, 16\)"):
        stage_of(source)
