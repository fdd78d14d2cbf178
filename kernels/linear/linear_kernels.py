"""Triton kernels of products with a fixed order of additions. Importing this file needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from ..shared_kernels import activated, await_inputs


# One program for any number of rows, also of one and of multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def multiply_rows(
    x, weight, bias, out, num_rows, num_outputs, num_inputs,
    stride_x, stride_input, stride_output, stride_out,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    IS_WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, tile of outputs), over all inputs from the first to the last.

    IS_WHOLE  inputs are a multiple of `INPUTS`
    DOT       type of factors; sums are of float32, rounded once

    A row's result depends on `OUTPUTS` and `INPUTS`, but not on the other rows: a tile always has
    the same number of rows, padded with zeros.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    number = tl.arange(0, INPUTS)
    has_row, has_output = row < num_rows, output < num_outputs
    wide_row, wide_output = row.to(tl.int64), output.to(tl.int64)
    x_at = x + wide_row[:, None] * stride_x + number[None, :]
    weight_at = weight + number.to(tl.int64)[:, None] * stride_input
    weight_at += wide_output[None, :] * stride_output
    total = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    for first in range(0, num_inputs, INPUTS):
        x_mask, weight_mask = has_row[:, None], has_output[None, :]
        if not IS_WHOLE:
            is_in = first + number < num_inputs
            x_mask, weight_mask = x_mask & is_in[None, :], weight_mask & is_in[:, None]
        part = tl.load(x_at, mask=x_mask, other=0.0)
        factors = tl.load(weight_at, mask=weight_mask, other=0.0)
        total = tl.dot(part.to(DOT), factors.to(DOT), total, input_precision="ieee")
        x_at += INPUTS
        weight_at += INPUTS * stride_input
    if HAS_BIAS:
        total += tl.load(bias + output, mask=has_output, other=0.0).to(tl.float32)[None, :]
    at_out = out + wide_row[:, None] * stride_out + output[None, :]
    tl.store(at_out, total.to(out.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])


# One program for any number of rows that its tile holds.
@triton.jit(do_not_specialize=["num_rows"])
def multiply_few_rows(
    x, weight, bias, out, num_rows, num_outputs, num_inputs, stride_x, stride_weight, stride_out,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, IS_WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, IS_GELU: tl.constexpr, DOT: tl.constexpr,
    DEPENDS: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs): all rows, over all inputs from the first to the last.

    IS_WHOLE  inputs are a multiple of `INPUTS`
    IS_GATED  the weight has as many further rows, whose outputs multiply the activated first ones
    DOT       type of factors; sums are of float32, rounded once

    The product is transposed, outputs by rows: tensor cores take 64 outputs at once, straight from
    shared memory, and as few as 8 rows.
    """
    await_inputs(DEPENDS)
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    number = tl.arange(0, INPUTS)
    has_row, has_output = row < num_rows, output < num_outputs
    x_at = x + row.to(tl.int64)[:, None] * stride_x + number[None, :]
    weight_at = weight + output.to(tl.int64)[:, None] * stride_weight + number[None, :]
    other_at = weight_at
    if IS_GATED:
        wide_output = (num_outputs + output).to(tl.int64)
        other_at = weight + wide_output[:, None] * stride_weight + number[None, :]
    total = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    other = total
    for first in range(0, num_inputs, INPUTS):
        x_mask, weight_mask = has_row[:, None], has_output[:, None]
        if not IS_WHOLE:
            is_in = (first + number < num_inputs)[None, :]
            x_mask, weight_mask = x_mask & is_in, weight_mask & is_in
        part = tl.trans(tl.load(x_at + first, mask=x_mask, other=0.0).to(DOT))
        factors = tl.load(weight_at + first, mask=weight_mask, other=0.0).to(DOT)
        total = tl.dot(factors, part, total, input_precision="ieee")
        if IS_GATED:
            factors = tl.load(other_at + first, mask=weight_mask, other=0.0).to(DOT)
            other = tl.dot(factors, part, other, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + output, mask=has_output, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            at_bias = bias + num_outputs + output
            other += tl.load(at_bias, mask=has_output, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        total = activated(total, IS_GELU) * other
    at_out = out + row.to(tl.int64)[:, None] * stride_out + output[None, :]
    rounded = tl.trans(total).to(out.dtype.element_ty)
    tl.store(at_out, rounded, mask=has_row[:, None] & has_output[None, :])


# One program for any number of rows that its tile holds.
@triton.jit(do_not_specialize=["num_rows"])
def multiply_normed_rows(
    x, weight, out, eps, num_rows, num_outputs, stride_x, stride_weight, stride_out,
    NUM_NORMS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, DOT: tl.constexpr, DEPENDS: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs): all rows, over all inputs from the first to the last.

    NUM_NORMS  slices of the inputs, side by side, each divided by its own root mean square
    SIZE       inputs of a slice
    DOT        type of factors; sums are of float32, rounded once

    A slice's squares are summed beside its products, and its products are scaled at its end. So
    rows are read once, and the weights need not wait for the mean squares. Transposed as in
    `multiply_few_rows`.
    """
    await_inputs(DEPENDS)
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    number = tl.arange(0, INPUTS)
    has_row, has_output = row < num_rows, output < num_outputs
    x_at = x + row.to(tl.int64)[:, None] * stride_x + number[None, :]
    weight_at = weight + output.to(tl.int64)[:, None] * stride_weight + number[None, :]
    total = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    for _ in range(NUM_NORMS):
        products = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
        squares = tl.zeros([ROWS], dtype=tl.float32)
        for first in range(0, SIZE, INPUTS):
            x_mask, weight_mask = has_row[:, None], has_output[:, None]
            if SIZE % INPUTS:
                is_in = (first + number < SIZE)[None, :]
                x_mask, weight_mask = x_mask & is_in, weight_mask & is_in
            part = tl.load(x_at + first, mask=x_mask, other=0.0)
            factors = tl.load(weight_at + first, mask=weight_mask, other=0.0).to(DOT)
            wide = part.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            products = tl.dot(factors, tl.trans(part.to(DOT)), products, input_precision="ieee")
        total += products * (1.0 / tl.sqrt(squares / SIZE + eps))[None, :]
        x_at += SIZE
        weight_at += SIZE
    at_out = out + row.to(tl.int64)[:, None] * stride_out + output[None, :]
    rounded = tl.trans(total).to(out.dtype.element_ty)
    tl.store(at_out, rounded, mask=has_row[:, None] & has_output[None, :])
