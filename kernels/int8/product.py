"""A product with weights of 8 bits in Triton, for few rows; importing this file needs Triton.

Few rows are bound by the bandwidth of reading weights, which is half that of 16 bits. Many rows are
bound by compute, where dequantising and a library's product are as fast. Gated activations are
fused into the product.
"""

# Triton accepts plain numbers for constexpr parameters, whatever their annotation.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..dependent_launch import dependent_launch
from ..dot_types import dot_type
from . import reference as int8_reference
from .int8_kernels import multiply_int8
from .reference import MOST_INT8_ROWS

LEAST_ROWS = 16
# Bytes of a row's inputs in a tile, so that tiles of all stages fit the shared memory of any GPU.
TILE_BYTES = {16: 512, 32: 512, 64: 256, 128: 128}
# Outputs of a program; fewer if the programs were too few to saturate the memory.
OUTPUTS, FEW_OUTPUTS = 32, 16
LEAST_PROGRAMS = 96
LAUNCH = {"num_warps": 4, "num_stages": 4, "enable_fp_fusion": True}


def int8_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *,
    activation: str | None = None,
) -> Tensor:  # fmt: skip
    """`x` [rows, inputs] times an int8 weight; see `kernels/int8/reference.py`."""
    num_rows, num_inputs = x.shape
    if num_rows > MOST_INT8_ROWS:
        return int8_reference.int8_linear(x, weight, scales, bias, activation=activation)
    num_outputs = len(weight) if activation is None else len(weight) // 2
    out = x.new_empty(num_rows, num_outputs)
    if not num_rows:
        return out
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    sizes = tile_sizes(num_rows, num_outputs, x.dtype, is_gated=activation is not None)
    multiply_int8[triton.cdiv(num_outputs, sizes["OUTPUTS"]),](
        x, weight, scales, out if bias is None else bias, out, num_rows, num_outputs, num_inputs,
        x.stride(0), out.stride(0), IS_WHOLE=num_inputs % sizes["INPUTS"] == 0,
        HAS_BIAS=bias is not None, IS_GATED=activation is not None,
        IS_GELU=activation == "gelu_tanh", DOT=dot_type(x.dtype), **sizes,
        **dependent_launch(x.device), **LAUNCH,
    )  # fmt: skip
    return out


def tile_sizes(
    num_rows: int, num_outputs: int, dtype: torch.dtype, *, is_gated: bool = False
) -> dict[str, int]:
    """ROWS, OUTPUTS and INPUTS of a program."""
    rows = max(triton.next_power_of_2(num_rows), LEAST_ROWS)
    # Factors of float32 are multiplied in registers, which hold fewer.
    tile_bytes = TILE_BYTES[rows] // (2 if dtype == torch.float32 else 1)
    is_small = is_gated or triton.cdiv(num_outputs, OUTPUTS) < LEAST_PROGRAMS
    return {
        "ROWS": rows,
        "OUTPUTS": FEW_OUTPUTS if is_small else OUTPUTS,
        "INPUTS": tile_bytes // dtype.itemsize,
    }
