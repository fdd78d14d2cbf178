"""Tiny random checkpoints of every supported kind, saved in Hugging Face format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
# Shorter than the tests' texts, so that it cuts.
WINDOW = 7


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A kind of model; `options` override `SIZES`."""

    config_class: type[PretrainedConfig]
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, num_layers: int | None = None) -> PretrainedConfig:
        options = {**SIZES, **self.options}
        if num_layers is not None:
            options["num_hidden_layers"] = num_layers
        if "layer_types" in options:
            options["layer_types"] = options["layer_types"][:num_layers]
        return self.config_class(**options)


KINDS: dict[str, TinyModel] = {
    "llama": TinyModel(LlamaConfig, {"tie_word_embeddings": True}),
    "llama_deep": TinyModel(LlamaConfig, {"num_hidden_layers": 8, "num_key_value_heads": 4}),
    "llama_scaled_rope": TinyModel(
        LlamaConfig,
        {
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "mistral": TinyModel(MistralConfig, {"sliding_window": WINDOW}),
    "qwen2": TinyModel(Qwen2Config),
    "qwen2_windowed": TinyModel(
        Qwen2Config,
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "qwen3": TinyModel(Qwen3Config, {"tie_word_embeddings": True}),
    "gemma": TinyModel(GemmaConfig, {"num_key_value_heads": 1}),
    "gemma2": TinyModel(
        Gemma2Config,
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": TinyModel(
        Gemma3TextConfig,
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
            },
        },
    ),
}


EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip
WINDOWED = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# Three layers that keep states to one of attention.
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
KIMI_LAYERS = ["linear_attention", "full_attention"] * 2
# Keys and values of all heads come from one latent.
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 6,
}  # fmt: skip
# Of which more than the layers is needed, by `model_type`.
FORWARD_KINDS: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere": {},
    "cohere2": WINDOWED,
    "ernie4_5": {},
    "exaone4": WINDOWED,
    "gemma4_text": {
        "global_head_dim": 8, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
        **WINDOWED,
    },
    "glm": {},
    "glm4": {},
    "gpt2": {},
    "gpt_neox": {},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "hunyuan_v1_dense": {},
    "ministral": WINDOWED,
    "ministral3": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOWED,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": {"sliding_window": WINDOW},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1]},
    "stablelm": {},
    "starcoder2": {"sliding_window": WINDOW},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, **EXPERTS},
    "glm4_moe": {
        "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, **EXPERTS
    },
    "glm4_moe_lite": {**LATENT, **EXPERTS},
    "deepseek_v2": {**LATENT, **EXPERTS, "q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek_v3": {
        "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, **LATENT, **EXPERTS
    },
    "minicpm3": LATENT,
    "youtu": LATENT,
    "gpt_oss": {**WINDOWED, **EXPERTS},
    "granitemoe": EXPERTS,
    "llama4_text": {"attention_chunk_size": 16, "intermediate_size_mlp": 48, **EXPERTS},
    "mixtral": EXPERTS,
    "olmoe": EXPERTS,
    "phimoe": EXPERTS,
    "qwen3_next": {"shared_expert_intermediate_size": 16, **DELTA, **EXPERTS},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {"shared_expert_intermediate_size": 16, **DELTA, **EXPERTS},
    "olmo_hybrid": DELTA,
    "kimi_linear": {
        "linear_head_dim": 8, "linear_num_heads": 4, "layer_types": KIMI_LAYERS,
        **LATENT, "q_lora_rank": None, **EXPERTS,
    },
    "bailing_hybrid": {
        "layer_types": KIMI_LAYERS, "n_group": 2, "topk_group": 1, **LATENT, **EXPERTS,
    },
    "granitemoehybrid": {
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8,
        "mamba_expand": 2, "layer_types": ["linear_attention", "full_attention"] * 2, **EXPERTS,
    },
    "falcon_h1": {
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_d_state": 8,
        "lm_head_multiplier": 0.5, "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9],
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8,
        "moe_shared_expert_intermediate_size": 16, **EXPERTS,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen2_moe": {"shared_expert_intermediate_size": 16, **EXPERTS},
    "qwen3_moe": EXPERTS,
}  # fmt: skip


def tiny_config(
    kind: str, num_layers: int | None = None, sizes: Mapping[str, int] | None = None
) -> PretrainedConfig:
    """Of a kind in `KINDS`, or in `FORWARD_KINDS`, which may have other sizes."""
    if kind in KINDS:
        assert not sizes
        return KINDS[kind].config(num_layers)
    own = {**SIZES, **FORWARD_KINDS[kind], **(sizes or {})}
    own["num_hidden_layers"] = num_layers or own["num_hidden_layers"]
    return AutoConfig.for_model(kind, **own)


def save_tiny_model(
    kind: str,
    folder: Path,
    *,
    num_layers: int | None = None,
    seed: int = 0,
    max_shard_size: str = "5GB",
    sizes: Mapping[str, int] | None = None,
) -> Path:
    """Write a random checkpoint of `kind` to `folder` and return the folder.

    Two layers are enough where a kind has layers of two types; None is as many as the kind has.

    Weights are larger than a fresh model's, and norms and biases are not at their neutral values,
    so that a term that is left out changes the logits visibly.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, num_layers, sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.1 if "norm" in name or "bias" in name else 0.25
            noise = torch.randn_like(parameter) * scale
            parameter.copy_(parameter + noise if "norm" in name else noise)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
