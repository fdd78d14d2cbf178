"""A product with weights of 8 bits in Triton, for few rows; importing this file needs Triton.

Few rows take as long as reading the weights does, and these are half of 16 bits'. Many rows take
as long as multiplying does, where a library's product of weights made anew is as fast.
"""

# Triton takes plain numbers for constants of a kernel, whatever their annotation.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..dot_types import dot_type
from . import reference as int8_reference
from .kernels import multiply_int8

MOST_ROWS = 128
LEAST_ROWS = 16
# Bytes of a row's inputs in a tile, so that tiles of all stages fit the shared memory of any GPU.
TILE_BYTES = {16: 512, 32: 512, 64: 256, 128: 128}
# Outputs of a program; fewer where there would be too few programs to keep a GPU reading.
OUTPUTS, FEW_OUTPUTS = 32, 16
LEAST_PROGRAMS = 96
LAUNCH = {"num_warps": 4, "num_stages": 4, "enable_fp_fusion": True}


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """`x` [rows, inputs] times an int8 weight, as `kernels/int8/reference.py` says."""
    (num_rows, num_inputs), num_outputs = x.shape, len(weight)
    if num_rows > MOST_ROWS:
        return int8_reference.int8_linear(x, weight, scales)
    out = x.new_empty(num_rows, num_outputs)
    if not num_rows:
        return out
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    sizes = tile_sizes(num_rows, num_outputs, x.dtype)
    multiply_int8[triton.cdiv(num_outputs, sizes["OUTPUTS"]),](
        x, weight, scales, out, num_rows, num_outputs, num_inputs, x.stride(0), out.stride(0),
        IS_WHOLE=num_inputs % sizes["INPUTS"] == 0, DOT=dot_type(x.dtype), **sizes, **LAUNCH,
    )  # fmt: skip
    return out


def tile_sizes(num_rows: int, num_outputs: int, dtype: torch.dtype) -> dict[str, int]:
    """ROWS, OUTPUTS and INPUTS of a program."""
    rows = max(triton.next_power_of_2(num_rows), LEAST_ROWS)
    is_small = triton.cdiv(num_outputs, OUTPUTS) < LEAST_PROGRAMS
    return {
        "ROWS": rows,
        "OUTPUTS": FEW_OUTPUTS if is_small else OUTPUTS,
        "INPUTS": TILE_BYTES[rows] // dtype.itemsize,
    }
