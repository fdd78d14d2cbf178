"""A checkpoint as a GGUF file, with its byte-level BPE tokenizer, as llama.cpp reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFWriter,
    TokenType,
    get_tensor_name_map,
)
from gguf.quants import quantize
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from ...core.errors import DraftlineError

# By `model_type`; a Mistral is a Llama there, and is known by its name.
ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
}
# llama.cpp's names of ways to cut a text into words.
SPLITS = {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}
ROUTER = "mlp.gate.weight"
OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
# Queries and keys are reordered in these, and norms are one more in those.
ROTATES_NEIGHBOURS, NORMS_AROUND_ONE = {"llama", "mistral"}, {"gemma2", "gemma3_text"}


def write_checkpoint(
    checkpoint: Path, path: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    others: Mapping[str, GGMLQuantizationType] | None = None,
) -> None:  # fmt: skip
    """Write a checkpoint of one safetensors file, and its tokenizer if it has one.

    kind    of the matrices; vectors and routers stay float32
    others  of matrices whose names end so

    Raises `DraftlineError` for a tokenizer that is not byte-level BPE as GPT-2 has it.
    """
    config = AutoConfig.from_pretrained(checkpoint)
    architecture = ARCHITECTURES[config.model_type]
    writer = GGUFWriter(path, _name(architecture))
    _add_settings(writer, config)
    tokenizer = checkpoint / "tokenizer.json"
    if tokenizer.exists():
        template = checkpoint / "chat_template.jinja"
        _add_tokenizer(writer, json.loads(tokenizer.read_text("utf-8")), config)
        if template.exists():
            writer.add_chat_template(template.read_text("utf-8"))
    else:
        writer.add_tokenizer_model("no_vocab")
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in _with_experts(load_file(checkpoint / "model.safetensors")).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, f"llama.cpp has no name for {name}"
        array = _stored(name, tensor.float().numpy(), config)
        is_matrix = array.ndim > 1 and not name.endswith(ROUTER)
        own = kind if is_matrix else GGMLQuantizationType.F32
        own = next((one for end, one in (others or {}).items() if name.endswith(end)), own)
        writer.add_tensor(stored, quantize(array, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _with_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With one tensor [experts, outputs, inputs] for the matrices of a layer's experts."""
    merged: dict[str, dict[int, Tensor]] = {}
    others = {}
    for name, tensor in tensors.items():
        if found := OF_EXPERT.fullmatch(name):
            owner, expert, matrix = found.groups()
            merged.setdefault(f"{owner}.{matrix}", {})[int(expert)] = tensor
        else:
            others[name] = tensor
    return others | {
        name: torch.stack([by_expert[expert] for expert in range(len(by_expert))])
        for name, by_expert in merged.items()
    }


def _name(architecture: MODEL_ARCH) -> str:
    return {MODEL_ARCH.GEMMA3: "gemma3"}.get(architecture, architecture.name.lower())


def _splits(pre_tokenizer: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of what cuts a text into words, one after the other."""
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return tuple(part["type"] for part in parts if not part.get("add_prefix_space"))


def _add_settings(writer: GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if config.model_type in NORMS_AROUND_ONE:
        writer.add_sliding_window(config.sliding_window)
    for setting, add in (
        ("num_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if getattr(config, setting, None) is not None:
            add(getattr(config, setting))


def _add_tokenizer(writer: GGUFWriter, tokenizer: Mapping[str, Any], config: Any) -> None:
    words = tokenizer["model"]
    splits = SPLITS.get(_splits(tokenizer["pre_tokenizer"]))
    if words["type"] != "BPE" or splits is None:
        raise DraftlineError(
            "only byte-level BPE, split as GPT-2 or SmolLM do it, can be written for llama.cpp"
        )
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    ids = {**words["vocab"], **{one["content"]: one["id"] for one in tokenizer["added_tokens"]}}
    tokens = sorted(ids, key=lambda token: ids[token])
    kinds = [TokenType.CONTROL if ids[token] in special else TokenType.NORMAL for token in tokens]
    merges = [one if isinstance(one, str) else " ".join(one) for one in words["merges"]]
    end = config.eos_token_id
    start = config.bos_token_id if config.bos_token_id is not None else end
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splits)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(start)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def _stored(name: str, array: np.ndarray, config: Any) -> np.ndarray:
    """A tensor as llama.cpp has it."""
    if config.model_type in ROTATES_NEIGHBOURS and name.endswith(
        ("q_proj.weight", "k_proj.weight")
    ):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return reordered(array, heads)
    if name.endswith("shared_expert_gate.weight"):
        return array[0]
    if config.model_type in NORMS_AROUND_ONE and name.endswith("norm.weight"):
        return array + 1
    return array


def reordered(weight: np.ndarray, heads: int) -> np.ndarray:
    """Queries or keys with the halves of each head interleaved: llama.cpp rotates neighbours."""
    outputs, inputs = weight.shape
    halves = weight.reshape(heads, 2, outputs // heads // 2, inputs)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(outputs, inputs)
