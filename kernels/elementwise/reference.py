"""What lies around a stage's products, in plain torch: float32 inside, rounded at the end."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

ACTIVATIONS = ("silu", "gelu_tanh")


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


def gated(gate_up: Tensor, out: Tensor, activation: str) -> None:
    """Store activation(left half) * right half of `gate_up` [rows, 2 size] in `out` [rows, size].

    `activation` is one of `ACTIVATIONS`.
    """
    left, right = gate_up.float().chunk(2, dim=-1)
    active = gelu(left, approximate="tanh") if activation == "gelu_tanh" else silu(left)
    out.copy_(active * right)


def log_softmax(logits: Tensor, out: Tensor) -> None:
    """Store the log-probabilities of `logits` float32 [rows, vocabulary] in `out` of that shape.

    At least one logit of a row must be finite; -inf is a token that cannot be.
    """
    out.copy_(torch.log_softmax(logits, dim=-1))
