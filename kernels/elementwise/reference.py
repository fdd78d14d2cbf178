"""The elementwise operators between a stage's products, in plain torch: float32 inside, rounded at
the end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from ..kv.reference import write_kv

ACTIVATIONS = ("silu", "gelu_tanh")


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """The norms of query and key heads; scales float32 [2, dim], those of queries first."""

    scales: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class KvTarget:
    """Where keys and values of rows are stored: as `write_kv` takes them (`kernels/kv/`)."""

    pairs: Tensor
    slots: Tensor
    scales: Tensor | None


def rms_norm(
    x: Tensor, scale: Tensor, eps: float, out: Tensor, residual: Tensor | None = None
) -> None:
    """Store x / sqrt(mean(x^2) + eps) * scale in `out`; over the last dimension.

    `x` is [rows, size] or [rows, groups, size], `scale` float32 [size]; `out` may be `x`. With
    `residual` [rows, size], for two dimensions only, it is first added to `x`, which keeps the sum.
    """
    if residual is not None:
        x.add_(residual)
    wide = x.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out.copy_(wide * factor * scale)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `heads` [rows, heads, dim] in place, the first half of dim against the second.

    `cos` and `sin` are [rows, 1, dim]; the first half of `sin` is negated
    (`models/layers/fast_modules.py`).
    """
    wide = heads.float()
    turned = torch.roll(wide, heads.shape[-1] // 2, -1)
    heads.copy_(wide * cos.float() + turned * sin.float())


def turn_and_store(
    heads: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, target: KvTarget
) -> None:
    """Norm query and key heads, where the model does so, and rotate them; store keys and values.

    `heads` [rows, heads, dim] are those of queries, keys and values. Queries are updated in place;
    the places of keys are undefined afterwards. `cos` and `sin` as of `rotate`.
    """
    kv_heads = target.pairs.shape[2]
    queries, keys, values = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        for part, scale in zip((queries, keys), norms.scales, strict=True):
            rms_norm(part, scale, norms.eps, part)
    rotate(heads[:, :-kv_heads], cos, sin)
    write_kv(keys, values, target.pairs, target.slots, target.scales)


def gated(gate_up: Tensor, out: Tensor, activation: str) -> None:
    """Store activation(left half) * right half of `gate_up` [rows, 2 size] in `out` [rows, size].

    `activation` is one of `ACTIVATIONS`.
    """
    left, right = gate_up.float().chunk(2, dim=-1)
    active = gelu(left, approximate="tanh") if activation == "gelu_tanh" else silu(left)
    out.copy_(active * right)


def log_softmax(logits: Tensor, out: Tensor) -> None:
    """Store the log-probabilities of `logits` float32 [rows, vocabulary] in `out` of that shape.

    At least one logit of a row must be finite; -inf marks an impossible token.
    """
    out.copy_(torch.log_softmax(logits, dim=-1))
