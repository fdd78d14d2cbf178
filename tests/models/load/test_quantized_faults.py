"""The error for everything that can be wrong with a quantised checkpoint, or is not read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftline.core.errors import CheckpointError
from draftline.models.layers.model_slice import load_slice, load_whole_model
from draftline.models.layers.weight_memory import held_bytes, read_weight_memory
from draftline.models.load.partition import LayerSpan
from draftline.models.load.quantization_config import read_quantization
from safetensors.torch import load_file, save_file
from support.inputs.quantized_checkpoints import FORMATS, Format, Pair, save_pair
from torch import Tensor
from transformers import LlamaConfig

WHOLE = LayerSpan(0, 4, 4)
MODULE = "model.layers.2.mlp.up_proj"
Edit = Callable[[dict[str, Tensor]], object]


def edit_tensors(pair: Pair, edit: Edit) -> None:
    file = pair.quantized / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def drop(*parts: str) -> Edit:
    return lambda tensors: [tensors.pop(f"{MODULE}.{part}") for part in parts]


def put(part: str, change: Callable[[Tensor], Tensor]) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{MODULE}.{part}"] = change(tensors[f"{MODULE}.{part}"])

    return edit


FAULTS: dict[str, tuple[str, Edit, str]] = {
    "no scales": ("gptq 4", drop("scales"), rf"tensor {MODULE}.scales missing; fetch it again"),
    "no words": (
        "awq", drop("qweight", "qzeros"),
        rf"tensors {MODULE}.qweight, {MODULE}.qzeros missing",
    ),
    "nothing": (
        "gptq 4", drop("qweight", "qzeros", "scales", "g_idx"), rf"tensor {MODULE}.weight missing"
    ),
    "no shape": ("packed 4", drop("weight_shape"), rf"{MODULE}.weight_shape missing"),
    "bytes without scales": (
        "fp8 blocks", drop("weight_scale_inv"),
        rf"{MODULE}.weight is torch.float8_e4m3fn and has no scale",
    ),
    "int8 without scales": (
        "compressed int8", drop("weight_scale"), r"torch.int8 and has no scale"
    ),
    "unknown parts": (
        "gptq 4", lambda t: t.update({f"{MODULE}.qscale": torch.ones(1), "x.y": torch.ones(1)}),
        rf"tensors {MODULE}.qscale, x.y unexpected in a llama model",
    ),
    "plain beside packed": (
        "packed 4", lambda t: t.update({f"{MODULE}.weight": torch.ones(48, 32)}),
        rf"{MODULE} has a plain weight beside a quantised one",
    ),
    "a bias that is not zero": (
        "gptq 4", lambda t: t.update({f"{MODULE}.bias": torch.ones(48)}),
        rf"tensor {MODULE}.bias unexpected",
    ),
    "floats for words": (
        "awq", put("qweight", lambda words: words.float()), r"packed words are torch.float32"
    ),
    "too few zero points": (
        "gptq 4", put("qzeros", lambda words: words[:1]), r"zero points \(48, 1\) beside scales"
    ),
    "zero points of fewer outputs": (
        "gptq 4", put("qzeros", lambda words: words[:, :3]), r"3 words of 8 values for 48 values"
    ),
    "groups without scales": (
        "gptq 4, act order", put("g_idx", lambda groups: groups + 1),
        r"group is none of the 2 that have scales",
    ),
    "groups of other inputs": (
        "gptq 4, act order", put("g_idx", lambda groups: groups[:5]), r"groups of 5 inputs",
    ),
    "another shape": (
        "packed 4", put("weight_shape", lambda shape: shape + 8), r"is not a weight \(56, 40\)"
    ),
    "scales of other outputs": (
        "compressed fp8 channel", put("weight_scale", lambda scales: scales[:5]),
        r"scales \(5, 1\) for a weight \(48, 32\)",
    ),
    "another block": (
        "fp8 blocks", put("weight_scale_inv", lambda scales: scales.repeat(2, 2)),
        r"scales \(4, 2\) for a weight \(48, 32\)",
    ),
    "integers for scales": (
        "fp8 blocks", put("weight_scale_inv", lambda scales: scales.to(torch.uint8)),
        r"scales are torch.uint8",
    ),
    "groups that do not divide the inputs": (
        "packed 4", put("weight_scale", lambda scales: scales.repeat(1, 3)[:, :5]),
        r"32 inputs in 5 groups",
    ),
    "halves for bytes": (
        "compressed int8", put("weight", lambda weight: weight.half()),
        r"weight is torch.float16 beside weight_scale",
    ),
    "another model's": (
        "awq", lambda tensors: [put(part, lambda one: one[:, : one.shape[1] // 3])(tensors)
                                for part in ("qweight", "qzeros", "scales")],
        rf"{MODULE}.weight has shape \(16, 32\), the config says \(48, 32\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_parts_that_do_not_fit_are_named(fault: str, tmp_path: Path) -> None:
    form, edit, message = FAULTS[fault]
    pair = save_pair("llama", FORMATS[form], tmp_path)
    edit_tensors(pair, edit)
    with pytest.raises(CheckpointError, match=message):
        load_slice(pair.quantized, WHOLE)


def test_a_stage_reads_its_own_parts_only(tmp_path: Path) -> None:
    pair = save_pair("llama", FORMATS["gptq 4"], tmp_path)
    edit_tensors(pair, drop("scales"))
    assert len(load_slice(pair.quantized, LayerSpan(0, 2, 4)).layers) == 2
    with pytest.raises(CheckpointError, match="scales missing"):
        load_slice(pair.quantized, LayerSpan(2, 4, 4))


def test_gptq_may_bring_biases_of_zeros(tmp_path: Path) -> None:
    pair = save_pair("llama", FORMATS["gptq 4"], tmp_path)
    edit_tensors(pair, lambda tensors: tensors.update({f"{MODULE}.bias": torch.zeros(48)}))
    part = load_slice(pair.quantized, WHOLE)
    assert not [name for name, _ in part.layers[2].named_parameters() if "bias" in name]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
    "hqq": ({"quant_method": "hqq"}, "quant_method 'hqq' are not read; give the unquantised model"),
    "exl2": ({"quant_method": "exl2"}, "'exl2'"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "'modelopt'"),
    "no method": ({"load_in_8bit": True}, "quantization_config without a method"),
    "awq gemv": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMV"}, "'GEMV'"),
    "awq of 3 bits": ({"quant_method": "awq", "bits": 3, "group_size": 64}, "of 3 bits"),
    "awq without zeros": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False},
        "without zero points",
    ),
    "gptq of 3 bits": ({"quant_method": "gptq", "bits": 3, "group_size": 64}, "of 3 bits"),
    "gptq without bits": ({"quant_method": "gptq"}, "has no number bits"),
    "gptq in groups of 0": ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "groups of 0"),
    "marlin": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "is_marlin_format": True}, "'marlin'"
    ),
    "another format": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "bitblas"},
        "'bitblas'",
    ),
    "halves packed": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "pack_dtype": "int16"}, "in int16"
    ),
    "blocks of one size": ({"quant_method": "fp8", "weight_block_size": 128}, "is 128 are not"),
    "nvfp4": (
        {
            "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
        },
        "'nvfp4-pack-quantized'",
    ),
    "packed in 3 bits": (
        {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 3}}},
        },
        "packed in 3 bits",
    ),
    "sparse": (
        {
            "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {},
            "sparsity_config": {"format": "sparse-24-bitmask"},
        },
        "sparse-24-bitmask",
    ),
    "rotated": (
        {
            "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {},
            "transform_config": {"config_groups": {"R1": {}}},
        },
        "rotated weights",
    ),
    "weights that are no fields": (
        {
            "quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"group_0": {"weights": "FP8"}},
        },
        "whose weights is 'FP8' are not read",
    ),
    "no groups": ({"quant_method": "compressed-tensors", "format": "x"}, "without config_groups"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_by_name(case: str, tmp_path: Path) -> None:
    config, message = REFUSED[case]
    pair = save_pair("llama", Format(config, FORMATS["awq"].write), tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_slice(pair.quantized, WHOLE)
    assert "compressed-tensors (FP8, int8" in str(caught.value)
    with pytest.raises(CheckpointError, match=message):
        read_weight_memory(pair.quantized)


def test_sizes_of_blocks_may_be_a_text(tmp_path: Path) -> None:
    form = FORMATS["compressed fp8 block"]
    config = json.loads(json.dumps(form.config))
    config["config_groups"]["group_0"]["weights"]["block_structure"] = "32x32"
    pair = save_pair("llama", Format(config, form.write), tmp_path)
    found, expected = (load_whole_model(one).state_dict() for one in (pair.quantized, pair.plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    config["config_groups"]["group_0"]["weights"]["block_structure"] = "32xall"
    edited = json.loads((pair.quantized / "config.json").read_text())
    edited["quantization_config"] = config
    (pair.quantized / "config.json").write_text(json.dumps(edited))
    with pytest.raises(CheckpointError, match=r"whose block_structure is \[32, 'all'\]"):
        load_slice(pair.quantized, WHOLE)


def test_modelopt_without_a_config_of_its_own(tmp_path: Path) -> None:
    assert read_quantization(tmp_path, LlamaConfig()) is None
    assert read_quantization(tmp_path, LlamaConfig(quantization_config={})) is None
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {}}))
    with pytest.raises(CheckpointError, match="'modelopt'"):
        read_quantization(tmp_path, LlamaConfig())


def test_mixed_precision_of_compressed_tensors(tmp_path: Path) -> None:
    """Some modules in FP8, others packed."""
    form = FORMATS["packed 4"]
    kept = tuple(f"model.layers.{layer}.mlp.{p}_proj" for layer in range(4) for p in ("up", "gate"))
    pair = save_pair("llama", form, tmp_path, keep=kept)
    other = save_pair("llama", FORMATS["compressed fp8 channel"], tmp_path / "other")
    fp8 = load_file(other.quantized / "model.safetensors")
    chosen = {name: fp8[name] for name in fp8 if name.rpartition(".")[0] in kept}
    edit_tensors(pair, lambda tensors: tensors.update(chosen))
    path = pair.quantized / "config.json"
    config = json.loads(path.read_text())
    groups = {
        name: source.config["config_groups"]["group_0"] | {"format": source.config["format"]}
        for name, source in (("a", form), ("b", FORMATS["compressed fp8 channel"]))
    }
    config["quantization_config"] |= {"format": "mixed-precision", "config_groups": groups}
    path.write_text(json.dumps(config))
    layers = (
        load_whole_model(one).get_submodule("model.layers.1.mlp").state_dict()
        for one in (pair.quantized, pair.plain, other.plain)
    )
    found, packed, in_fp8 = layers
    assert torch.equal(found["down_proj.weight"], packed["down_proj.weight"])
    assert torch.equal(found["up_proj.weight"], in_fp8["up_proj.weight"])


def test_memory_once_loaded(tmp_path: Path) -> None:
    pair = save_pair("llama", FORMATS["gptq 4, act order"], tmp_path)
    memory = read_weight_memory(pair.quantized)
    assert memory.stored_as == "GPTQ, 4 bits, groups of 16, act order"
    assert memory.stored_bytes == (pair.quantized / "model.safetensors").stat().st_size
    assert read_weight_memory(pair.plain).stored_as == "plain"
    memory = read_weight_memory(pair.quantized, dtype="bfloat16")
    for quantization in ("none", "int8"):
        part = load_slice(pair.quantized, WHOLE, "bfloat16", "cpu", quantization)
        loaded = held_bytes(part.layers, part.embed, part.norm, part.head)
        assert memory.num_bytes(quantization) == loaded
