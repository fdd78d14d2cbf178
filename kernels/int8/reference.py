"""A product with weights of 8 bits, by torch alone."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """`x` [rows, inputs] times the weight that `weight` times `scales` stands for.

    weight  int8 [outputs, inputs]
    scales  float32 [outputs]

    Gives [rows, outputs] in the dtype of `x`. Makes the weight anew in that dtype every time.
    """
    return (linear(x, weight.to(x.dtype)) * scales).to(x.dtype)
