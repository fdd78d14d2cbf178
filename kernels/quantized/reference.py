"""Products with quantised weights, by torch alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linear.reference import few_rows_linear
from .kept_weight import KeptWeight

# Largest number of rows of the kernel, unless its tiles of rows are fixed.
MOST_QUANTIZED_ROWS = 128


def quantized_linear(
    x: Tensor, weight: KeptWeight, bias: Tensor | None = None, *,
    activation: str | None = None, out_dtype: torch.dtype | None = None,
    row_tile: int | None = None,  # noqa: ARG001 - of the kernel
) -> Tensor:  # fmt: skip
    """`x` [rows, inputs] times a quantised weight, plus `bias` [outputs].

    The values are those of `KeptWeight.dequantized`, rounded to the dtype of `x`: a product of any
    number of rows has the same factors. Sums are of float32, rounded once, to `out_dtype`, by
    default that of `x`.

    activation  `silu` or `gelu_tanh`: the first half of the outputs is activated and multiplied
                with the second half, which gives half as many. At most `MOST_QUANTIZED_ROWS` rows
                have one, unless there is a `row_tile`
    row_tile    rows of a program, for any number of rows: a row's result then depends on no other
    """
    return few_rows_linear(
        x, weight.dequantized(x.dtype), bias, activation=activation, out_dtype=out_dtype
    )
