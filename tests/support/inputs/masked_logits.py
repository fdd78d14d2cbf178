"""Logits of a P-EAGLE drafter behind a whole text, by its formulas, without cache or modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from draftline.models.heads.p_eagle import PEagle
from torch import Tensor
from torch.nn import functional

from . import head_checkpoints as published


def masked_logits(
    model: Any, head: PEagle, features: Tensor, behind: Sequence[int], num_masks: int
) -> Tensor:
    """[vocabulary] of draft `num_masks` (from 0).

    features  [rows, width]  of the target's states
    behind    of each row, the token behind
    """
    weights, config = head.state_dict(), head.config
    tokens = torch.tensor([*behind, *[config.mask_token] * num_masks])
    table = weights.get("embed_tokens.weight", model.base_model.embed_tokens.weight)
    every = torch.cat([features, weights["mask_hidden"][0].expand(num_masks, -1)])
    if "fc_norm.0.weight" in weights:
        parts = enumerate(every.split(config.feature_size, -1))
        every = torch.cat([_rms(part, weights[f"fc_norm.{k}.weight"]) for k, part in parts], -1)
    states = _first_layer(every @ weights["fc.weight"].T, table[tokens], head)
    for layer in range(1, config.num_layers):
        own = _of_layer(weights, layer)
        normed = _rms(states, own["input_layernorm.weight"])
        states = _behind_attention(states, _attention(normed, own), own)
    said = weights["lm_head.weight"] @ _rms(states, weights["norm.weight"])[-1]
    logits = torch.full((config.vocab_size,), -torch.inf)
    logits[torch.arange(len(said)) + weights["d2t"]] = said
    return logits


def _first_layer(hidden: Tensor, embeddings: Tensor, head: PEagle) -> Tensor:
    own = _of_layer(head.state_dict(), 0)
    normed = _rms(hidden, own["hidden_norm.weight"])
    pair = torch.cat([_rms(embeddings, own["input_layernorm.weight"]), normed], -1)
    before = normed if head.config.norm_before_residual else hidden
    return _behind_attention(before, _attention(pair, own), own)


def _behind_attention(before: Tensor, attended: Tensor, own: Mapping[str, Tensor]) -> Tensor:
    states = before + attended
    normed = _rms(states, own["post_attention_layernorm.weight"])
    gate, up, down = (own[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return states + (functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T


def _of_layer(weights: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    prefix = f"layers.{layer}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }


def _rms(states: Tensor, weight: Tensor) -> Tensor:
    eps = published.LLAMA["rms_norm_eps"]
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps) * weight


def _attention(states: Tensor, own: Mapping[str, Tensor]) -> Tensor:
    """Every row sees itself and all before it, masks among them; row i stands at position i."""
    size = published.HEAD
    queries, keys, values = (
        (states @ own[f"self_attn.{name}_proj.weight"].T).view(len(states), -1, size)
        for name in "qkv"
    )
    angles = torch.arange(len(states))[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    cos, sin = (torch.cat([part, part], -1)[:, None] for part in (angles.cos(), angles.sin()))

    def turned(part: Tensor) -> Tensor:
        first, second = part.chunk(2, -1)
        return part * cos + torch.cat([-second, first], -1) * sin

    rows = []
    for row in range(len(states)):
        seen = slice(0, row + 1)
        scores = torch.einsum("hd,kgd->hk", turned(queries)[row], turned(keys)[seen])
        shares = (scores / size**0.5).softmax(-1)
        rows.append(torch.einsum("hk,kgd->hd", shares, values[seen]).flatten())
    return torch.stack(rows) @ own["self_attn.o_proj.weight"].T
