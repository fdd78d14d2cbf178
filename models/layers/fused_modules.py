"""Replacements of some of transformers' modules on GPUs: one launch between two products.

The same modules as in `fast_modules.py`, for any float type; decoder layers that add the
attention's result directly before a norm are replaced, too, so that both are one launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from ...kernels.dispatch import ElementwiseOps, load_elementwise, load_few_rows_linear
from ...kernels.elementwise.reference import HeadNorms
from ..attention.kernel_attention import StepKernels
from ..attention.step_attention import StepAttention
from .fast_modules import ATTENTIONS, GATED_MLPS, NORMS, FastAttention, Rotation
from .linear_layers import FewRows, GpuProduct, PackedLinear, gpu_linear

# transformers' names of activations -> those of `ElementwiseOps.gated`.
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


@dataclass(frozen=True, slots=True)
class FusedOps:
    """The elementwise operators and the product of few rows of one implementation."""

    elementwise: ElementwiseOps
    few_rows: FewRows

    @classmethod
    def load(cls, name: str) -> FusedOps:
        """Those of `triton` or `reference`."""
        return cls(load_elementwise(name), load_few_rows_linear(name))

    def linear(self, *linears: nn.Linear | PackedLinear) -> GpuProduct:
        """One layer of several of the same input."""
        return gpu_linear(self.few_rows, *linears)


def can_be_fused(layer: Any) -> bool:
    """Whether `make_fused` applies to a decoder layer."""
    attention = layer.self_attn
    if type(attention) not in ATTENTIONS:
        return False
    products = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return all(isinstance(one, nn.Linear | PackedLinear) for one in products)


def make_fused(module: Any, ops: FusedOps) -> Any:
    """A module's fused replacement; an unknown module itself, with its known children replaced.

    Layers then take hidden states and rotations as those of `fast_modules.make_fast` do.
    """
    if type(module) in NORMS:
        return FusedRmsNorm(module, ops.elementwise)
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

    def after_adding(self, x: Tensor, residual: Tensor) -> Tensor:
        """Normalises `x + residual`; the sum is stored in `x`."""
        out = torch.empty_like(x)
        self._norm(x, self.scale, self.eps, out, residual)
        return out

    __call__ = forward  # There are no hooks to run.


class FusedGatedMlp(nn.Module):
    """The gated feed-forward block: two products, and of many rows a launch in between."""

    def __init__(self, mlp: Any, ops: FusedOps) -> None:
        super().__init__()
        self.gate_up = ops.linear(mlp.gate_proj, mlp.up_proj)
        self.down = ops.linear(mlp.down_proj)
        self.activation = ACTIVATIONS[type(mlp.act_fn)]
        self._gated = ops.elementwise.gated

    def forward(self, x: Tensor) -> Tensor:
        """`x` [rows, hidden_size], in and out."""
        few = self.gate_up.gated(x, self.activation)
        if few is not None:
            return self.down(few)
        both = self.gate_up(x)
        out = both.new_empty(len(x), both.shape[1] // 2)
        self._gated(both, out, self.activation)
        return self.down(out)

    __call__ = forward


class FusedAttention(FastAttention):
    """Norms of heads, rotations and the store of keys and values in one launch.

    With other attention backends, heads are normed and rotated in separate launches.
    """

    def __init__(self, attention: Any, ops: FusedOps) -> None:
        super().__init__(attention, ops.linear)
        self._ops = ops.elementwise
        self._norms: HeadNorms | None = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = [FusedRmsNorm(norm, self._ops) for norm in (attention.q_norm, attention.k_norm)]
            assert norms[0].eps == norms[1].eps
            self._norms = HeadNorms(torch.stack([norm.scale for norm in norms]), norms[0].eps)

    def forward(
        self, hidden_states: Tensor, position_embeddings: Rotation,
        attention_mask: StepAttention | StepKernels, **unused: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """`hidden_states` [rows, hidden_size], in and out."""
        if not isinstance(attention_mask, StepKernels):
            return super().forward(hidden_states, position_embeddings, attention_mask, **unused)
        num_rows = len(hidden_states)
        heads = self.project(hidden_states).view(num_rows, -1, self.head_dim)
        target = attention_mask.target(self.layer)
        self._ops.turn_and_store(heads, *position_embeddings, self._norms, target)
        query = heads[:, : self.num_heads]
        out = attention_mask.attend(self.layer, query, self.scaling, self.window, self.softcap)
        return self.out(out.reshape(num_rows, -1)), None

    __call__ = forward

    def turn(self, heads: Tensor, rotation: Rotation) -> None:
        """Normalise and rotate query and key heads in place: a launch for each norm, one to rotate.

        `heads` is [rows, heads, head_dim], those of values last.
        """
        if self._norms is not None:
            parts = heads[:, : self.num_heads], heads[:, self.num_heads : self.num_rotated]
            for part, scale in zip(parts, self._norms.scales, strict=True):
                self._ops.rms_norm(part, scale, self._norms.eps, part)
        self._ops.rotate(heads[:, : self.num_rotated], *rotation)


class FusedLayer(nn.Module):
    """A decoder layer that adds and normalises at once."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.self_attn: nn.Module = layer.self_attn
        self.mlp: nn.Module = layer.mlp
        self.before_attention: FusedRmsNorm = layer.input_layernorm
        self.before_mlp: FusedRmsNorm = layer.post_attention_layernorm

    def run(self, states: Tensor, addend: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        """Takes and returns hidden states [rows, hidden_size] as two parts that are not added yet.

        The first norm adds the inputs, and stores the sum in `addend`; without an addend, `states`
        are complete, and stay unchanged.
        """
        if addend is None:
            normed = self.before_attention(states)
        else:
            normed = self.before_attention.after_adding(addend, states)
            states = addend
        attended, _ = self.self_attn(hidden_states=normed, **options)
        normed = self.before_mlp.after_adding(attended, states)
        return attended, self.mlp(normed)

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """`hidden_states` [rows, hidden_size], in and out; the input is left as it is."""
        attended, addend = self.run(hidden_states, None, **options)
        return attended.add_(addend)

    __call__ = forward
