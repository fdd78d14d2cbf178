"""gpt-oss's experts in MXFP4, as the checkpoint stores them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.errors import CheckpointError
from draftline.models.layers.model_slice import load_slice
from draftline.models.load.partition import LayerSpan
from safetensors.torch import load_file, save_file
from support.tools.tiny_models import EXPERTS, SIZES
from transformers import AutoModelForCausalLM, GptOssConfig

WHOLE = LayerSpan(0, 2, 2)
# Of a sign, two bits of exponent and one of mantissa (OCP MX, E2M1).
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two layers, whose matrices of experts have whole blocks of 32."""
    config = GptOssConfig(
        **{**SIZES, **EXPERTS, "num_hidden_layers": 2, "intermediate_size": 64},
        layer_types=["full_attention"] * 2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def pack(folder: Path) -> dict[str, np.ndarray]:
    """Replace the experts by random packed ones; what these stand for."""
    rng, tensors, expected = np.random.default_rng(0), {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        codes = rng.integers(0, 16, (experts, outputs, inputs // 32, 32))
        scales = rng.integers(120, 128, codes.shape[:-1])
        numbers = VALUES[codes] * np.exp2(scales[..., None] - 127).astype(np.float32)
        expected[name] = numbers.reshape(experts, outputs, inputs).swapaxes(1, 2)
        packed = codes[..., ::2] | codes[..., 1::2] << 4
        tensors[f"{name}_blocks"] = torch.from_numpy(packed.astype(np.uint8))
        tensors[f"{name}_scales"] = torch.from_numpy(scales.astype(np.uint8))
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


def test_packed_experts_are_what_they_stand_for(folder: Path) -> None:
    expected = pack(folder)
    layers = load_slice(folder, WHOLE).layers
    assert len(expected) == 4
    for name, numbers in expected.items():
        _, _, layer, rest = name.split(".", 3)
        found = layers[int(layer)].get_parameter(rest)
        np.testing.assert_array_equal(found.detach().numpy(), numbers)


def test_lost_scales_are_named(folder: Path) -> None:
    pack(folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file(
        {one: kept for one, kept in tensors.items() if one != name}, folder / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=f"tensor {name} missing"):
        load_slice(folder, WHOLE)
