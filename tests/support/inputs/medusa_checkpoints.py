"""Checkpoints of Medusa's heads, in the layouts that projects publish.

Sizes as of `head_checkpoints.py`; three heads of two blocks.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from .head_checkpoints import HIDDEN, VOCAB, Shapes, tensors

NUM_HEADS, NUM_LAYERS, KNOWN = 3, 2, 10


def medusa() -> Shapes:
    """As FasterDecoding saves them."""
    blocks: Shapes = {}
    for head in range(NUM_HEADS):
        for layer in range(NUM_LAYERS):
            blocks[f"{head}.{layer}.linear.weight"] = (HIDDEN, HIDDEN)
            blocks[f"{head}.{layer}.linear.bias"] = (HIDDEN,)
        blocks[f"{head}.{NUM_LAYERS}.weight"] = (VOCAB, HIDDEN)
    return blocks


def in_model_optimizer(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Beside the model, as Model Optimizer writes what TensorRT-LLM converts."""
    return {f"medusa_heads.{name}": tensor for name, tensor in own.items()} | {
        "model.embed_tokens.weight": torch.ones(VOCAB, HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": torch.ones(HIDDEN, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": torch.ones(VOCAB, HIDDEN),
    }


def in_tensorrt(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """As TensorRT-LLM's converted checkpoints have them, beside the model."""
    found = {}
    for name, tensor in own.items():
        head, part, rest = name.split(".", 2)
        inner = "lm_head.weight" if rest == "weight" else f"medusa_layers.{part}.{rest}"
        found[f"medusa_heads.{head}.{inner}"] = tensor
    return found | {"transformer.layers.0.attention.dense.weight": torch.ones(HIDDEN, HIDDEN)}


def in_vllm(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """As vLLM reads them."""
    found = {}
    for name, tensor in own.items():
        head, part, rest = name.split(".", 2)
        if rest == "weight":
            found[f"lm_heads.{head}.weight"] = tensor
        else:
            found[f"blocks.{head}.layers.{part}.{rest.removeprefix('linear.')}"] = tensor
    return found


def save_tensors(
    folder: Path, held: dict[str, Tensor], config: dict[str, object], file: str
) -> Path:
    """Write a checkpoint in the format that the file's name says."""
    folder.mkdir(parents=True, exist_ok=True)
    if file.endswith(".safetensors"):
        save_file({name: tensor.clone() for name, tensor in held.items()}, folder / file)
    else:
        torch.save(held, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def medusa_tensors() -> dict[str, Tensor]:
    """Random ones under FasterDecoding's names."""
    return tensors(medusa())


def save_counting_target(folder: Path, tokenizer: Path, hidden_size: int = 64) -> Tensor:
    """A target that says of token `v` that `v + 1` follows, whatever stands before.

    Its layers add nothing; returns the unit vectors [vocabulary, hidden_size] of the tokens, which
    are its states.
    """
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    size = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    config = LlamaConfig(
        vocab_size=size, hidden_size=hidden_size, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=512,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    rng = torch.Generator().manual_seed(1)
    units = torch.nn.functional.normalize(torch.randn(size, hidden_size, generator=rng), dim=-1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(units)
        # Row v + 1 answers to the state of token v; no other unit vector is as near to it.
        model.lm_head.weight.copy_(units.roll(1, 0))
    model.save_pretrained(folder)
    return units


def save_counting_medusa(folder: Path, units: Tensor, num_heads: int, late: int = 0) -> Path:
    """Heads for that target: head k answers to the state of token `v` with `v + 2 + k + late`."""
    size = units.shape[1]
    held = {}
    for head in range(num_heads):
        held[f"{head}.0.linear.weight"] = torch.zeros(size, size)
        held[f"{head}.0.linear.bias"] = torch.zeros(size)
        held[f"{head}.1.weight"] = units.roll(2 + head + late, 0)
    return save_tensors(folder, held, {"medusa_num_heads": num_heads}, "medusa_lm_head.pt")
