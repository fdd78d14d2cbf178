"""Replacements of the modules of `fast_modules.py` where a stage is compiled.

Products are draftline's own operator; what lies between two products is written plainly, for the
compiler to fuse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.cpu.build import vectors
from ...kernels.cpu.packed_linear import pack_weight, packed_linear
from ..attention.operator import attend
from .fast_modules import FastAttention, FastGatedMlp, FastLinear, FastRmsNorm


def make_compilable(module: Any) -> Any:
    """A module's compilable replacement; an unknown one itself, with its children replaced."""
    if isinstance(module, FastRmsNorm):
        return CompiledRmsNorm(module)
    if isinstance(module, FastGatedMlp):
        return CompiledGatedMlp(module)
    if isinstance(module, FastAttention):
        return CompiledAttention(module)
    for name, child in list(module.named_children()):
        setattr(module, name, make_compilable(child))
    return module


class PackedLinear(nn.Module):
    """Linear layers of one input as one product, their outputs side by side."""

    def __init__(self, *linears: FastLinear) -> None:
        super().__init__()
        weight = torch.cat([linear.weight for linear in linears], dim=1)
        self.outputs = weight.shape[1]
        self.weight = _constant(pack_weight(weight, vectors().panel))
        self.bias: nn.Parameter | None = None
        if linears[0].bias is not None:
            self.bias = _constant(torch.cat([_bias(linear) for linear in linears]))

    def forward(self, x: Tensor) -> Tensor:
        """`x` [rows, inputs] -> [rows, outputs]."""
        out = packed_linear(x.contiguous(), self.weight, self.outputs)
        return out if self.bias is None else out + self.bias


class CompiledRmsNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight."""

    def __init__(self, norm: FastRmsNorm) -> None:
        super().__init__()
        size = len(norm.scale)
        self.eps = norm.floor.item() ** 2 / size
        self.weight = _constant(norm.scale / size**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension of `x`."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class CompiledGatedMlp(nn.Module):
    """The gated feed-forward block, gate and up in one product."""

    def __init__(self, mlp: FastGatedMlp) -> None:
        super().__init__()
        self.gate_up = PackedLinear(mlp.gate, mlp.up)
        self.down = PackedLinear(mlp.down)
        self.act = mlp.act

    def forward(self, x: Tensor) -> Tensor:
        """`x` [rows, hidden_size], in and out."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class CompiledAttention(nn.Module):
    """Projection, rotation, and the attention operator."""

    def __init__(self, attention: FastAttention) -> None:
        super().__init__()
        self.layer = attention.layer
        self.head_dim = attention.head_dim
        self.num_heads = attention.num_heads
        self.num_rotated = attention.num_rotated
        self.options = (attention.scaling, attention.window, attention.softcap)
        self.project = PackedLinear(attention.project)
        self.out = PackedLinear(attention.out)
        self.q_norm = attention.q_norm and CompiledRmsNorm(attention.q_norm)
        self.k_norm = attention.k_norm and CompiledRmsNorm(attention.k_norm)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_unused: object
    ) -> tuple[Tensor, None]:
        """`hidden_states` [rows, hidden_size], in and out."""
        heads = self.project(hidden_states).view(len(hidden_states), -1, self.head_dim)
        rotated, values = heads[:, : self.num_rotated], heads[:, self.num_rotated :]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
            rotated = torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)
        cos, sin = position_embeddings
        half = self.head_dim // 2
        turned = torch.cat((rotated[..., half:], rotated[..., :half]), dim=-1)
        heads = torch.cat((rotated * cos + turned * sin, values), dim=1)
        return self.out(attend(heads, self.layer, self.num_heads, *self.options)), None


def _constant(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _bias(linear: FastLinear) -> Tensor:
    assert linear.bias is not None
    return linear.bias
