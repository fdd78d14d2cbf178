"""A product with weights of 8 bits in Triton, for few rows. Importing this file needs Triton.

Few rows are bound by reading weights, which are half of 16 bits. Many rows are bound by compute,
where dequantising and a library's product are as fast.
"""

# Triton accepts plain numbers for constexpr parameters, whatever their annotation.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shared_kernels import activated, await_inputs, dependent_launch, dot_type
from . import reference as int8_reference
from .reference import MOST_INT8_ROWS


# One program for any number of rows that its tile holds.
@triton.jit(do_not_specialize=["num_rows"])
def multiply_int8(
    x, weight, scales, bias, out, num_rows, num_outputs, num_inputs, stride_x, stride_out,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, IS_WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, IS_GELU: tl.constexpr, DOT: tl.constexpr,
    DEPENDS: tl.constexpr,
):  # fmt: skip
    """Program (outputs): some outputs of all rows, over all inputs.

    IS_WHOLE  inputs are a multiple of `INPUTS`
    IS_GATED  the weight has as many further rows, whose outputs multiply the activated first ones
    DOT       type of factors

    Whole numbers up to 127 are exact in every float type, and sums are of float32.
    """
    await_inputs(DEPENDS)
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    number = tl.arange(0, INPUTS)
    has_row, has_output = row < num_rows, output < num_outputs
    x_at = x + row.to(tl.int64)[:, None] * stride_x + number[None, :]
    weight_at = weight + output.to(tl.int64)[:, None] * num_inputs + number[None, :]
    other_at = weight_at
    if IS_GATED:
        wide_output = (num_outputs + output).to(tl.int64)
        other_at = weight + wide_output[:, None] * num_inputs + number[None, :]
    total = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    other = total
    for first in range(0, num_inputs, INPUTS):
        x_mask, weight_mask = has_row[:, None], has_output[:, None]
        if not IS_WHOLE:
            is_in = (first + number < num_inputs)[None, :]
            x_mask, weight_mask = x_mask & is_in, weight_mask & is_in
        part = tl.load(x_at + first, mask=x_mask, other=0.0).to(DOT)
        factors = tl.load(weight_at + first, mask=weight_mask, other=0)
        total = tl.dot(part, tl.trans(factors.to(DOT)), total, input_precision="ieee")
        if IS_GATED:
            factors = tl.load(other_at + first, mask=weight_mask, other=0)
            other = tl.dot(part, tl.trans(factors.to(DOT)), other, input_precision="ieee")
    total = _scaled(total, scales, bias, output, has_output, HAS_BIAS)
    if IS_GATED:
        other = _scaled(other, scales, bias, num_outputs + output, has_output, HAS_BIAS)
        total = activated(total, IS_GELU) * other
    at_out = out + row.to(tl.int64)[:, None] * stride_out + output[None, :]
    tl.store(at_out, total.to(out.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])


@triton.jit
def _scaled(total, scales, bias, output, has_output, HAS_BIAS: tl.constexpr):
    """Sums [rows, outputs] at the scales of their outputs, with the bias."""
    total *= tl.load(scales + output, mask=has_output, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + output, mask=has_output, other=0.0).to(tl.float32)[None, :]
    return total


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
