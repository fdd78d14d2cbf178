"""Linear layers, by torch alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, rms_norm, silu

# Largest number of rows of the kernels of `few_rows_linear` and `normed_linear`.
MOST_FEW_ROWS = 64


def invariant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`x` [rows, inputs] times `weight` [inputs, outputs] of the same dtype, plus `bias` [outputs].

    Returns [rows, outputs] in that dtype, or in `out_dtype`. In this reference, the rounding of a
    row may depend on the number of rows.
    """
    out = torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
    return out.to(out_dtype or x.dtype)


def few_rows_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    activation: str | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`x` [rows, inputs] times `weight` [outputs, inputs] of the same dtype, plus `bias` [outputs].

    With an `activation` (`silu` or `gelu_tanh`) the first half of the outputs is activated and
    multiplied with the second half, which gives half as many. Sums are of float32 and rounded once,
    to `out_dtype`, by default that of `x`.
    """
    wide = linear(x.float(), weight.float(), None if bias is None else bias.float())
    if activation is not None:
        left, right = wide.chunk(2, dim=-1)
        left = gelu(left, approximate="tanh") if activation == "gelu_tanh" else silu(left)
        wide = left * right
    return wide.to(out_dtype or x.dtype)


def normed_linear(x: Tensor, weight: Tensor, num_norms: int, eps: float) -> Tensor:
    """`x` [rows, inputs], normed by slices, times `weight` [outputs, inputs] of the same dtype.

    `num_norms` slices as wide as each other lie side by side. Each is divided by its own
    sqrt(mean(x^2) + eps); the scales of the norms are part of `weight`. Returns [rows, outputs] in
    the dtype of `x`.
    """
    slices = x.unflatten(-1, (num_norms, -1))
    return linear(rms_norm(slices, slices.shape[-1:], eps=eps).flatten(-2), weight)


def library_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`x` [rows, inputs] times `weight` [outputs, inputs] of the same dtype, by torch's library.

    Sums are of float32, rounded once, to `out_dtype`, by default that of `x`.
    """
    if out_dtype is None or out_dtype == x.dtype:
        return linear(x, weight, bias)
    if x.is_cuda:
        out = torch.mm(x, weight.t(), out_dtype=out_dtype)
    else:
        out = linear(x.float(), weight.float()).to(out_dtype)
    return out if bias is None else out.add_(bias)
