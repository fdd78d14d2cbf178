"""Checkpoints of trained drafters with the names and shapes that their projects publish.

Small sizes: vocabulary 40, hidden size 16, two heads of 8, one of them for keys, MLP 24 wide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, HIDDEN, HEADS, KV, HEAD, INNER, FUSED = 40, 16, 2, 8, 8, 24, 28
DRAFT_VOCAB, RANK = 10, 6

Shapes = dict[str, tuple[int, ...]]

# Of a LLaMA config with one layer, as EAGLE's drafts have it.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
}


# Five features have no layers by default.
DEEP: dict[str, Any] = {**LLAMA, "eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4, 5]}

# A Qwen3 config with a block of four rows, as z-lab has it.
DFLASH: dict[str, Any] = {
    **LLAMA,
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "head_dim": HEAD,
    "dflash_config": {"block_size": 4, "mask_token_id": VOCAB - 1, "target_layer_ids": [1, 3]},
}
# Every layer another: one sees a few tokens and no row behind, the other all; row 0 drafts, too.
MIXED_DFLASH: dict[str, Any] = {
    **LLAMA,
    "block_size": 3,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "dflash_config": {
        "mask_token_id": 7, "target_layer_ids": [0, 4], "sample_from_anchor": True,
        "output_multiplier": 0.5, "final_logit_softcapping": 2.0, "input_embedding_scale": 3.0,
    },
}  # fmt: skip
# All at its top, as DeepSpec has it.
DSPARK: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 3,
    "mask_token_id": VOCAB - 1,
    "target_layer_ids": [-1, 3],
    "markov_rank": RANK,
}
# As speculators write it; the embedding was trained, too.
SPECULATORS_P_EAGLE: dict[str, Any] = {
    "speculators_model_type": "peagle",
    "transformer_layer_config": {**LLAMA, "num_hidden_layers": 2},
    "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
    "norm_before_residual": True,
    "draft_vocab_size": DRAFT_VOCAB,
    "embed_requires_grad": True,
    "mask_token_id": VOCAB - 1,
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]},
}
# As its authors' files have it for vLLM, one layer with norms of each feature.
P_EAGLE: dict[str, Any] = {
    **LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "ptd_token_id": VOCAB - 2,
    "parallel_drafting": True,
}
SPECULATORS_DFLASH: dict[str, Any] = {
    "speculators_model_type": "dflash",
    "transformer_layer_config": LLAMA,
    "aux_hidden_state_layer_ids": [2, 4],
    "draft_vocab_size": DRAFT_VOCAB,
    "mask_token_id": VOCAB - 1,
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
}


def attention(prefix: str, width: int = HIDDEN) -> Shapes:
    """A layer's attention that reads states of some width."""
    return {
        f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD, width),
        f"{prefix}self_attn.k_proj.weight": (KV, width),
        f"{prefix}self_attn.v_proj.weight": (KV, width),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
    }


def mlp(prefix: str, output: int = HIDDEN) -> Shapes:
    """A layer's MLP."""
    return {
        f"{prefix}mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (INNER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (output, INNER),
    }


def eagle() -> Shapes:
    """EAGLE-1, EAGLE-2 and HASS, with the fusion's bias."""
    return {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        "fc.bias": (HIDDEN,),
        **attention("layers.0."),
        **mlp("layers.0."),
        "layers.0.post_attention_layernorm.weight": (HIDDEN,),
    }


def _split(fusion: Shapes) -> Shapes:
    body = {name: shape for name, shape in eagle().items() if not name.startswith("fc.")}
    return body | mlp("layers.0.", 2 * HIDDEN) | {
        "fc.fc.weight": (HIDDEN, 2 * HIDDEN),
        "fc.fc.bias": (HIDDEN,),
        "fc.mlp.down_proj.weight": (HIDDEN, FUSED),
        "fc.post_attention_layernorm.weight": (HIDDEN,),
        **fusion,
    }  # fmt: skip


def fspad() -> Shapes:
    """FSPAD."""
    return _split(
        {"fc.mlp.gate_proj.weight": (FUSED, HIDDEN), "fc.mlp.up_proj.weight": (FUSED, HIDDEN)}
    )


def griffin() -> Shapes:
    """GRIFFIN."""
    return _split(
        {
            "fc.mlp.input_layernorm.weight": (HIDDEN,),
            "fc.mlp.up_proj.weight": (FUSED, 2 * HIDDEN),
        }
    )


def eagle3(layer: str = "midlayer.", num_features: int = 3) -> Shapes:
    """EAGLE-3 as its authors save it, or with `layers.0.` as speculators do."""
    return {
        "fc.weight": (HIDDEN, num_features * HIDDEN),
        **attention(layer, 2 * HIDDEN),
        **mlp(layer),
        f"{layer}hidden_norm.weight": (HIDDEN,),
        f"{layer}input_layernorm.weight": (HIDDEN,),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        "d2t": (DRAFT_VOCAB,),
        "t2d": (VOCAB,),
    }


def deep_eagle3() -> Shapes:
    """EAGLE-3 over five features with query norms and the whole vocabulary, as DeepSpec has it."""
    shapes = eagle3("layers.0.", 5) | {
        "layers.0.self_attn.q_norm.weight": (HEAD,),
        "layers.0.self_attn.k_norm.weight": (HEAD,),
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    return {name: shape for name, shape in shapes.items() if name not in {"d2t", "t2d"}}


def p_eagle_of_speculators() -> Shapes:
    """P-EAGLE of two layers, the second an ordinary one."""
    layer = "layers.1."
    return eagle3("layers.0.") | attention(layer) | mlp(layer) | {
        f"{layer}input_layernorm.weight": (HIDDEN,),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "mask_hidden": (1, 1, 3 * HIDDEN),
    }  # fmt: skip


def p_eagle() -> Shapes:
    """P-EAGLE of one layer that shares the target's embedding."""
    norms = {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(3)}
    return eagle3() | norms | {"mask_hidden": (1, 1, 3 * HIDDEN)}


def dflash(num_layers: int = 2) -> Shapes:
    """DFlash over two features."""
    shapes: Shapes = {
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for index in range(num_layers):
        layer = f"layers.{index}."
        shapes |= attention(layer) | mlp(layer)
        shapes |= {
            f"{layer}self_attn.q_norm.weight": (HEAD,),
            f"{layer}self_attn.k_norm.weight": (HEAD,),
            f"{layer}input_layernorm.weight": (HIDDEN,),
            f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        }
    return shapes


def dflash_of_speculators() -> Shapes:
    """DFlash with an embedding and an output head of its own, over a smaller vocabulary."""
    return dflash() | {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        "d2t": (DRAFT_VOCAB,),
        "t2d": (VOCAB,),
    }


def dspark(kind: str = "vanilla") -> Shapes:
    """DSpark as DeepSpec saves it, with a confidence head that reads states and tokens."""
    shapes = dflash() | {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "markov_head.markov_w1.weight": (VOCAB, RANK),
        "markov_head.markov_w2.weight": (VOCAB, RANK),
        "confidence_head.proj.weight": (1, HIDDEN + RANK),
        "confidence_head.proj.bias": (1,),
    }
    if kind == "gated":
        shapes["markov_head.gate_proj.weight"] = (RANK, HIDDEN + RANK)
        shapes["markov_head.gate_proj.bias"] = (RANK,)
    elif kind == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * RANK, 2 * RANK + HIDDEN)
        shapes["markov_head.joint_proj.bias"] = (3 * RANK,)
    return shapes


def spec_former(draft_length: int = 4) -> Shapes:
    """SpecFormer."""
    part = {
        f"{name}.{projection}_proj.weight": shape
        for name in ("decoder_att", "encoder_att")
        for projection, shape in (
            ("q", (HEADS * HEAD, HIDDEN)), ("k", (KV, HIDDEN)), ("v", (KV, HIDDEN)),
            ("o", (HIDDEN, HEADS * HEAD)),
        )
    }  # fmt: skip
    norms = ("decoder_input_norm", "positional_input_norm", "encoder_input_norm")
    return {
        **{f"norms.{index}.weight": (HIDDEN,) for index in range(4)},
        "down_samp.weight": (HIDDEN, 4 * HIDDEN),
        **part,
        **{f"{name}.weight": (HIDDEN,) for name in (*norms, "encoder_ffn_input_norm")},
        "positional.weight": (draft_length * HIDDEN, HIDDEN),
        "positional.bias": (draft_length * HIDDEN,),
        "encoder_ffn.up_proj.weight": (INNER, HIDDEN),
        "encoder_ffn.gate_proj.weight": (INNER, HIDDEN),
        "encoder_ffn.down_proj.weight": (HIDDEN, INNER),
    }


def tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors; norms about 1, and a map of draft tokens to every fourth of the target's."""
    rng = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        if name == "d2t":
            found[name] = 3 * torch.arange(shape[0])
        elif name == "t2d":
            found[name] = torch.arange(shape[0]) % 4 == 0
        else:
            scale = 0.1 if "norm" in name else shape[-1] ** -0.5
            found[name] = scale * torch.randn(shape, generator=rng) + float("norm" in name)
    return found


def save(folder: Path, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Path:
    """Write a checkpoint in safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(shapes), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
