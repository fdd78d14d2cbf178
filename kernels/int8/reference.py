"""A product with weights of 8 bits, by torch alone."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import gelu, linear, silu

# Largest number of rows that the kernel takes.
MOST_INT8_ROWS = 128


def int8_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *,
    activation: str | None = None,
) -> Tensor:  # fmt: skip
    """`x` [rows, inputs] times the weight that `weight` times `scales` stands for, plus `bias`.

    weight  int8 [outputs, inputs]
    scales  float32 [outputs]; bias [outputs]

    With an `activation` (`silu` or `gelu_tanh`) the first half of the outputs is activated and
    multiplied with the second half, which gives half as many. Returns the dtype of `x`. Dequantises
    the weight to that dtype on every call.
    """
    wide = linear(x, weight.to(x.dtype)) * scales
    if bias is not None:
        wide = wide + bias
    if activation is not None:
        left, right = wide.chunk(2, dim=-1)
        left = gelu(left, approximate="tanh") if activation == "gelu_tanh" else silu(left)
        wide = left * right
    return wide.to(x.dtype)
