"""The decoder layer of a feature head; its caller keeps the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .dflash_config import DFlashConfig
from .feature_head_config import FeatureHeadConfig

# Maps the layer's index and its queries, keys and values to the attention result; all are [...,
# rows, heads, head_dim]. Of latents keys and values are one tensor, not a copy. The caller of the
# head keeps earlier keys and values, and the mask.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class HeadRotation(nn.Module):
    """Rotary embedding by the head's own parameters, which need not be the target's.

    Positions beyond the config's limit are allowed: draft configs often have 2,048.
    """

    def __init__(self, head_dim: int, max_positions: int, rope: Mapping[str, Any]) -> None:
        """`rope`: as `rope_parameters` of transformers."""
        super().__init__()
        self._embedding = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                max_position_embeddings=max_positions,
                rope_parameters=dict(rope),
            )
        )

    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., rows, 1, head_dim] of int64 [..., rows], in the dtype of `like`;
        sines of the first half negated."""
        cos, sin = self._embedding(like, positions.reshape(1, -1))
        sin[..., : sin.shape[-1] // 2].neg_()
        shape = (*positions.shape, 1, cos.shape[-1])
        return cos.view(shape), sin.view(shape)

    @staticmethod
    def turned(rotation: tuple[Tensor, Tensor], *heads: Tensor) -> tuple[Tensor, ...]:
        """Queries or keys [..., rows, heads, head_dim], turned by their rows' rotations."""
        cos, sin = rotation
        half = cos.shape[-1] // 2
        return tuple(torch.addcmul(one * cos, one.roll(half, -1), sin) for one in heads)


class HeadAttention(nn.Module):
    """Attention of states `input_size` wide: twice the hidden size in EAGLE-3's first layer."""

    def __init__(self, config: FeatureHeadConfig | DFlashConfig, input_size: int) -> None:
        super().__init__()
        self._head_dim = config.head_dim
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias = config.has_attention_bias
        self.q_proj = nn.Linear(input_size, query, bias=bias)
        self.k_proj = nn.Linear(input_size, key, bias=bias)
        self.v_proj = nn.Linear(input_size, key, bias=bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        self._has_query_norm = config.has_query_norm
        if config.has_query_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def keys_values(self, states: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [..., rows, kv_heads, head_dim] of states [..., rows, input_size]."""
        keys = self.k_proj(states).unflatten(-1, (-1, self._head_dim))
        if self._has_query_norm:
            keys = self.k_norm(keys)
        values = self.v_proj(states).unflatten(-1, (-1, self._head_dim))
        return HeadRotation.turned(rotation, keys)[0], values

    def forward(
        self, index: int, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """[..., rows, hidden_size] of [..., rows, input_size]."""
        queries = self.q_proj(states).unflatten(-1, (-1, self._head_dim))
        if self._has_query_norm:
            queries = self.q_norm(queries)
        keys, values = self.keys_values(states, rotation)
        (queries,) = HeadRotation.turned(rotation, queries)
        return self.o_proj(attend(index, queries, keys, values).flatten(-2))


class HeadMlp(nn.Module):
    """The gated MLP; `output_size` is twice the hidden size where two features leave the layer."""

    def __init__(self, config: FeatureHeadConfig | DFlashConfig, output_size: int) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, output_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[..., output_size] of [..., hidden_size]."""
        return self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))


class HeadLayer(nn.Module):
    """One decoder layer.

    The first layer of an EAGLE-style head has no norm before its attention; that of EAGLE-3 norms
    both halves of a pair. Further layers are ordinary.
    """

    def __init__(self, config: FeatureHeadConfig, index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._index, self._config = index, config
        self._is_pair = config.fusion == "pair" and index == 0
        is_last = index == config.num_layers - 1
        self._is_split = config.splits_output and is_last
        self.self_attn = HeadAttention(config, 2 * hidden if self._is_pair else hidden)
        self.mlp = HeadMlp(config, 2 * hidden if self._is_split else hidden)
        if self._is_pair:
            self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        if self._is_pair or index:
            self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)

    def forward(
        self,
        states: Tensor,
        embeddings: Tensor,
        rotation: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        """[..., rows, hidden_size] of as many, or both features side by side."""
        residual = states
        if self._is_pair and self._config.norm_before_residual:
            residual = self.hidden_norm(states)
        inputs = self.inputs(states, embeddings)
        state = residual + self.self_attn(self._index, inputs, rotation, attend)
        change = self.mlp(self.post_attention_layernorm(state))
        return (torch.cat([state, state], dim=-1) if self._is_split else state) + change

    def inputs(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """The input of its attention, [..., rows, hidden_size], or twice as wide for a pair."""
        if self._is_pair:
            pair = [self.input_layernorm(embeddings), self.hidden_norm(states)]
            return torch.cat(pair, dim=-1)
        return self.input_layernorm(states) if self._index else states
