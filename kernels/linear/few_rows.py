"""A linear layer in Triton for up to `MOST_FEW_ROWS` rows; importing needs Triton.

So few rows take as long as reading the weights does. Every sum goes over the inputs in their order,
in tiles that depend on the layer and on the rows (16, 32 or 64 at once) alone; gated activations
are computed where their inputs are summed up.
"""

# Triton takes plain numbers for constants of a kernel, whatever their annotation.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..dependent_launch import dependent_launch
from ..dot_types import dot_type
from .kernels import multiply_few_rows
from .reference import MOST_FEW_ROWS

LEAST_ROWS = 16
# Bytes of a row's inputs in a tile, by rows: with the weights, tiles of all stages fit the shared
# memory of any GPU.
TILE_BYTES = {16: 512, 32: 256, 64: 128}
# Outputs of a program; fewer where there would be too few programs to keep a GPU reading.
OUTPUTS, FEW_OUTPUTS = 32, 16
LEAST_PROGRAMS = 264
LAUNCH = {"num_warps": 4, "num_stages": 4, "enable_fp_fusion": True}


def few_rows_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    activation: str | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`x` [rows, inputs] times a weight, as `kernels/linear/reference.py` says."""
    num_rows, num_inputs = x.shape
    num_outputs = len(weight) if activation is None else len(weight) // 2
    assert num_rows <= MOST_FEW_ROWS
    assert x.dtype == weight.dtype
    assert x.stride(1) == weight.stride(1) == 1
    out = x.new_empty(num_rows, num_outputs, dtype=out_dtype)
    if not num_rows:
        return out
    sizes = tile_sizes(num_rows, num_outputs, x.dtype, is_gated=activation is not None)
    multiply_few_rows[triton.cdiv(num_outputs, sizes["OUTPUTS"]),](
        x, weight, out if bias is None else bias, out, num_rows, num_outputs, num_inputs,
        x.stride(0), weight.stride(0), out.stride(0),
        IS_WHOLE=num_inputs % sizes["INPUTS"] == 0, HAS_BIAS=bias is not None,
        IS_GATED=activation is not None, IS_GELU=activation == "gelu_tanh",
        DOT=dot_type(x.dtype), **sizes, **dependent_launch(x.device), **LAUNCH,
    )  # fmt: skip
    return out


def tile_sizes(
    num_rows: int, num_outputs: int, dtype: torch.dtype, *, is_gated: bool
) -> dict[str, int]:
    """ROWS, OUTPUTS and INPUTS of a program."""
    rows = max(triton.next_power_of_2(num_rows), LEAST_ROWS)
    is_small = is_gated or triton.cdiv(num_outputs, OUTPUTS) < LEAST_PROGRAMS
    return {
        "ROWS": rows,
        "OUTPUTS": FEW_OUTPUTS if is_small else OUTPUTS,
        "INPUTS": TILE_BYTES[rows] // dtype.itemsize,
    }
