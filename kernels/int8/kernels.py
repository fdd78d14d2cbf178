"""A product with weights of 8 bits in a Triton kernel. Importing this file needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply_int8(
    x, weight, scales, out, num_rows, num_outputs, num_inputs, stride_x, stride_out,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, IS_WHOLE: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Program (outputs): some outputs of all rows, over all inputs.

    IS_WHOLE  inputs are a multiple of `INPUTS`
    DOT       type of factors

    Whole numbers up to 127 are exact in every float type, and sums are of float32.
    """
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    number = tl.arange(0, INPUTS)
    has_row, has_output = row < num_rows, output < num_outputs
    x_at = x + row.to(tl.int64)[:, None] * stride_x + number[None, :]
    weight_at = weight + output.to(tl.int64)[:, None] * num_inputs + number[None, :]
    total = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    for first in range(0, num_inputs, INPUTS):
        x_mask, weight_mask = has_row[:, None], has_output[:, None]
        if not IS_WHOLE:
            is_in = (first + number < num_inputs)[None, :]
            x_mask, weight_mask = x_mask & is_in, weight_mask & is_in
        part = tl.load(x_at + first, mask=x_mask, other=0.0)
        factors = tl.load(weight_at + first, mask=weight_mask, other=0)
        total = tl.dot(part.to(DOT), tl.trans(factors.to(DOT)), total, input_precision="ieee")
    total *= tl.load(scales + output, mask=has_output, other=0.0)[None, :]
    at_out = out + row.to(tl.int64)[:, None] * stride_out + output[None, :]
    tl.store(at_out, total.to(out.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])
