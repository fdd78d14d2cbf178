"""A tiny gpt-oss with its experts in MXFP4, as the checkpoint stores them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

from ..tools.tiny_models import EXPERTS, SIZES
from .quantized_checkpoints import Pair

# Of a sign, two bits of exponent and one of mantissa (OCP MX, E2M1).
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])


def save_mxfp4_pair(folder: Path) -> Pair:
    """With random experts, of two layers, whose matrices have whole blocks of 32."""
    config = GptOssConfig(
        **{**SIZES, **EXPERTS, "num_hidden_layers": 2, "intermediate_size": 64},
        layer_types=["full_attention"] * 2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_bias"):
                parameter.normal_(std=0.5)
    model.save_pretrained(folder / "plain")
    shutil.copytree(folder / "plain", folder / "quantized")
    rng, packed, plain = np.random.default_rng(0), {}, {}
    for name, tensor in load_file(folder / "plain/model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = plain[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        codes = rng.integers(0, 16, (experts, outputs, inputs // 32, 32))
        scales = rng.integers(120, 126, codes.shape[:-1])
        numbers = VALUES[codes] * np.exp2(scales[..., None] - 127).astype(np.float32)
        values = numbers.reshape(experts, outputs, inputs).swapaxes(1, 2)
        plain[name] = torch.from_numpy(np.ascontiguousarray(values))
        both = codes[..., ::2] | codes[..., 1::2] << 4
        packed[f"{name}_blocks"] = torch.from_numpy(both.astype(np.uint8))
        packed[f"{name}_scales"] = torch.from_numpy(scales.astype(np.uint8))
    save_file(plain, folder / "plain/model.safetensors", metadata={"format": "pt"})
    save_file(packed, folder / "quantized/model.safetensors")
    path = folder / "quantized/config.json"
    fields = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(fields))
    return Pair(folder / "quantized", folder / "plain")
