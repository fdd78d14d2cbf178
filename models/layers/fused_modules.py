"""Replacements of some of transformers' modules on GPUs: one launch between two products.

The same modules as in `fast_modules.py`, for any float type; decoder layers that add what their
attention gives straight before a norm are replaced, too, so that both are one launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from ...kernels.elementwise.dispatch import ElementwiseOps
from .fast_modules import ATTENTIONS, GATED_MLPS, NORMS, FastAttention, FastLinear, Rotation

# Of transformers' activations, what `ElementwiseOps.gated` calls them.
ACTIVATIONS: dict[type[nn.Module], str] = {
    SiLUActivation: "silu", nn.SiLU: "silu", GELUTanh: "gelu_tanh",
}  # fmt: skip
# x + attention(norm(x)), then the same of the feed-forward block.
LAYERS: tuple[type[nn.Module], ...] = (
    llama.LlamaDecoderLayer,
    mistral.MistralDecoderLayer,
    qwen2.Qwen2DecoderLayer,
    qwen3.Qwen3DecoderLayer,
    gemma.GemmaDecoderLayer,
)


def can_be_fused(layer: Any) -> bool:
    """Whether `make_fused` applies to a decoder layer."""
    known = type(layer.self_attn) in ATTENTIONS
    return known and isinstance(layer.self_attn.q_proj, nn.Linear)


def make_fused(module: Any, ops: ElementwiseOps) -> Any:
    """A module's fused replacement; an unknown one itself, with its known children replaced.

    Layers then take hidden states and rotations as those of `fast_modules.make_fast` do.
    """
    if type(module) in NORMS:
        return FusedRmsNorm(module, ops)
    if type(module) in GATED_MLPS and type(module.act_fn) in ACTIVATIONS:
        return FusedGatedMlp(module, ops)
    if type(module) in ATTENTIONS:
        return FusedAttention(module, ops)
    for name, child in list(module.named_children()):
        setattr(module, name, make_fused(child, ops))
    return FusedLayer(module) if type(module) in LAYERS else module


class FusedRmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight in one launch."""

    def __init__(self, norm: Any, ops: ElementwiseOps) -> None:
        super().__init__()
        self.eps: float = getattr(norm, "variance_epsilon", None) or norm.eps
        self.scale = norm.weight.detach().float() + NORMS[type(norm)]
        self._norm = ops.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension of `x`."""
        out = torch.empty_like(x)
        self._norm(x, self.scale, self.eps, out)
        return out

    def in_place(self, x: Tensor) -> None:
        """Normalises `x` in place."""
        self._norm(x, self.scale, self.eps, x)

    def after_adding(self, x: Tensor, residual: Tensor) -> Tensor:
        """Normalises `x + residual`; the sum is stored in `x`."""
        out = torch.empty_like(x)
        self._norm(x, self.scale, self.eps, out, residual)
        return out

    __call__ = forward  # There are no hooks to run.


class FusedGatedMlp(nn.Module):
    """The gated feed-forward block: two products and a launch in between."""

    def __init__(self, mlp: Any, ops: ElementwiseOps) -> None:
        super().__init__()
        self.gate_up = FastLinear(mlp.gate_proj, mlp.up_proj)
        self.down = FastLinear(mlp.down_proj)
        self.activation = ACTIVATIONS[type(mlp.act_fn)]
        self._gated = ops.gated

    def forward(self, x: Tensor) -> Tensor:
        """`x` [rows, hidden_size], in and out."""
        both = self.gate_up(x)
        out = both.new_empty(len(x), both.shape[1] // 2)
        self._gated(both, out, self.activation)
        return self.down(out)

    __call__ = forward


class FusedAttention(FastAttention):
    """Norms of heads and rotations in place, a launch each."""

    def __init__(self, attention: Any, ops: ElementwiseOps) -> None:
        super().__init__(attention)
        self._rotate = ops.rotate
        self._head_norms: list[tuple[slice, FusedRmsNorm]] = []
        if self.q_norm is not None and self.k_norm is not None:
            keys = slice(self.num_heads, self.num_rotated)
            self._head_norms = [
                (slice(self.num_heads), FusedRmsNorm(attention.q_norm, ops)),
                (keys, FusedRmsNorm(attention.k_norm, ops)),
            ]

    def turn(self, heads: Tensor, rotation: Rotation) -> None:
        """Normalise and rotate query and key heads in place: a launch for each norm, one to rotate.

        `heads` is [rows, heads, head_dim], those of values last.
        """
        for part, norm in self._head_norms:
            norm.in_place(heads[:, part])
        self._rotate(heads[:, : self.num_rotated], *rotation)


class FusedLayer(nn.Module):
    """A decoder layer that adds and normalises at once."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.self_attn: nn.Module = layer.self_attn
        self.mlp: nn.Module = layer.mlp
        self.before_attention: FusedRmsNorm = layer.input_layernorm
        self.before_mlp: FusedRmsNorm = layer.post_attention_layernorm

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """`hidden_states` [rows, hidden_size], in and out; the input is left as it is."""
        normed = self.before_attention(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **options)
        normed = self.before_mlp.after_adding(attended, hidden_states)
        return self.mlp(normed).add_(attended)

    __call__ = forward
