"""Small checkpoints of random weights with a layer for multi-token prediction, under the names that
published ones have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

NUM_LAYERS, HIDDEN, VOCAB = 3, 64, 512
LAYER = re.compile(r"layers\.(\d+)\.")
SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts_per_tok": 2, "max_position_embeddings": 256,
}  # fmt: skip
# GLM-4.5's: layers are counted on behind the last one, which has copies of embedding and head.
GLM = {
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
# DeepSeek-V3's: the same names around a layer with latent attention.
DEEPSEEK = GLM | {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "n_group": 2, "topk_group": 1,
}  # fmt: skip
# Qwen3-Next's: its config says nothing of `mtp.`.
QWEN_NEXT = {
    "num_experts": 4, "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
KINDS = {
    "glm4_moe": GLM, "qwen3_next": QWEN_NEXT, "deepseek_v3": DEEPSEEK, "glm4_moe_lite": DEEPSEEK,
}  # fmt: skip


def write_mtp_checkpoint(folder: Path, kind: str, num_mtp_layers: int = 1) -> Path:
    """A checkpoint of a kind in `KINDS`; its last layer becomes that of prediction, and further
    ones are of zeros."""
    torch.manual_seed(7)
    fields = {"num_hidden_layers": NUM_LAYERS + 1, **SIZES, **KINDS[kind]}
    if "qk_rope_head_dim" in fields:
        # Latent attention has head sizes of its own.
        del fields["head_dim"]
    config: Any = AutoConfig.for_model(kind, **fields)
    model: Any = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(std=0.2)
            if "norm" in name:
                weight.add_(1.0)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    is_named = kind == "qwen3_next"
    tensors = (_named if is_named else _counted_on)(tensors)
    first = "mtp.layers.0." if is_named else f"model.layers.{NUM_LAYERS}."
    for number in range(1, num_mtp_layers):
        prefix = LAYER.sub(lambda own, by=number: f"layers.{int(own[1]) + by}.", first)
        tensors |= {
            name.replace(first, prefix): torch.zeros_like(tensor)
            for name, tensor in tensors.items() if name.startswith(first)
        }  # fmt: skip
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | {"num_hidden_layers": NUM_LAYERS}
    if not is_named:
        fields["num_nextn_predict_layers"] = num_mtp_layers
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:NUM_LAYERS]
    path.write_text(json.dumps(fields))
    return folder


def _norm() -> Tensor:
    return 1 + 0.1 * torch.randn(HIDDEN)


def _counted_on(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    layer = f"model.layers.{NUM_LAYERS}"
    return tensors | {
        f"{layer}.enorm.weight": _norm(),
        f"{layer}.hnorm.weight": _norm(),
        f"{layer}.eh_proj.weight": 0.1 * torch.randn(HIDDEN, 2 * HIDDEN),
        f"{layer}.shared_head.norm.weight": _norm(),
        f"{layer}.shared_head.head.weight": tensors["lm_head.weight"].clone(),
        f"{layer}.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }


def _named(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    last = f"model.layers.{NUM_LAYERS}."
    moved = {
        f"mtp.layers.0.{name.removeprefix(last)}" if name.startswith(last) else name: tensor
        for name, tensor in tensors.items()
    }
    return moved | {
        "mtp.pre_fc_norm_embedding.weight": _norm() - 1,
        "mtp.pre_fc_norm_hidden.weight": _norm() - 1,
        "mtp.fc.weight": 0.1 * torch.randn(HIDDEN, 2 * HIDDEN),
        "mtp.norm.weight": _norm() - 1,
    }
