"""Products with quantised weights in Triton. Importing this file needs Triton.

Few rows are bound by reading weights, which are a half or a quarter of 16 bits. They are widened in
registers: to float32, in which they are scaled, and from there to the dtype of the rows. More rows
are bound by compute: the weight is dequantised on every call, and a library multiplies.
"""

# Triton accepts plain numbers for constexpr parameters, whatever their annotation.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..linear.reference import library_linear
from ..shared_kernels import (
    LEAST_ROWS,
    OUTPUTS,
    activated,
    await_inputs,
    dependent_launch,
    dot_type,
    num_stages,
)
from .kept_weight import FLOATS, KeptWeight
from .reference import MOST_QUANTIZED_ROWS

# 2^23 as a float32, and its bits: a code in the lowest ones is added to it.
UNITS = tl.constexpr(8388608.0)
UNIT_BITS = tl.constexpr(0x4B000000)


@triton.jit
def _values(
    codes, scale, offset, ZERO: tl.constexpr, FLOAT_BITS: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    ARE_MINIMA: tl.constexpr,
):  # fmt: skip
    """float32 values of codes [lines, n] at scales and offsets [lines].

    FLOAT_BITS  of codes that are floats: 8 of e4m3, 4 of e2m1; 0: they are integers
    """
    bits = codes.to(tl.int32)
    if FLOAT_BITS == 8:
        value = ((bits & 128) << 24 | (bits & 127) << 20).to(tl.float32, bitcast=True)
    elif FLOAT_BITS == 4:
        value = ((bits & 8) << 28 | (bits & 7) << 22).to(tl.float32, bitcast=True)
    else:
        # Faster than a conversion, and as exact: so is the difference of whole numbers.
        value = (bits | UNIT_BITS).to(tl.float32, bitcast=True)
        if HAS_OFFSETS and not ARE_MINIMA:
            value -= (offset + UNITS)[:, None]
        else:
            value -= UNITS + ZERO
    value *= scale[:, None]
    if ARE_MINIMA:
        value += offset[:, None]
    return value


@triton.jit
def _of_group(scales, offsets, at, mask, HAS_OFFSETS: tl.constexpr):
    """Scales and offsets [lines]; without offsets the scales twice."""
    scale = tl.load(scales + at, mask=mask, other=0)
    if scales.dtype.element_ty == tl.uint8:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    offset = scale
    if HAS_OFFSETS:
        offset = tl.load(offsets + at, mask=mask, other=0.0)
    return scale, offset


# One program for any number of rows that its tile holds.
@triton.jit(do_not_specialize=["num_rows"])
def multiply_quantized(
    x, codes, scales, offsets, bias, out, num_rows, num_outputs, num_lines, num_inputs,
    stride_x, stride_codes, stride_out,
    BITS: tl.constexpr, FLOAT_BITS: tl.constexpr, ZERO: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    ARE_MINIMA: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr, IS_GELU: tl.constexpr, DOT: tl.constexpr, DEPENDS: tl.constexpr,
):  # fmt: skip
    """Program (outputs, rows): a tile of either, over all inputs from the first to the last.

    codes     [num_lines, stride_codes]; scales and offsets [groups, num_lines] (`KeptWeight`)
    GROUP     inputs of a group; 0: all are one
    TILE      that of the weight, a multiple of `INPUTS`
    IS_WHOLE  inputs fill the codes
    IS_GATED  the weight has as many further lines, whose outputs multiply the activated first ones
    DOT       type of factors; sums are of float32, rounded once

    The product is transposed, as that of `multiply_few_rows`. Of 4 bits, the low ones of a tile are
    multiplied first: each half has its own inputs, and nothing is interleaved.
    """
    await_inputs(DEPENDS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    number = tl.arange(0, INPUTS)
    has_row, has_output = row < num_rows, output < num_outputs
    x_at = x + row.to(tl.int64)[:, None] * stride_x + number[None, :]
    codes_at = codes + output.to(tl.int64)[:, None] * stride_codes + number[None, :]
    other_line = num_outputs + output
    others_at = codes + other_line.to(tl.int64)[:, None] * stride_codes + number[None, :]
    total = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    other = total
    scale, offset = _of_group(scales, offsets, output, has_output, HAS_OFFSETS)
    other_scale, other_offset = scale, offset
    if IS_GATED:
        other_scale, other_offset = _of_group(scales, offsets, other_line, has_output, HAS_OFFSETS)
    for at in range(0, stride_codes, INPUTS):
        packed = tl.load(codes_at + at, mask=has_output[:, None], other=0)
        other_packed = packed
        if IS_GATED:
            other_packed = tl.load(others_at + at, mask=has_output[:, None], other=0)
        first = at if BITS == 8 else at + at // TILE * TILE
        for half in tl.static_range(8 // BITS):  # pyright: ignore[reportGeneralTypeIssues]
            inputs = first + half * TILE
            x_mask = has_row[:, None]
            if not IS_WHOLE:
                x_mask = x_mask & (inputs + number < num_inputs)[None, :]
            part = tl.trans(tl.load(x_at + inputs, mask=x_mask, other=0.0).to(DOT))
            if GROUP and (half == 0 or GROUP % (2 * TILE)):
                group = inputs // GROUP * num_lines
                scale, offset = _of_group(scales, offsets, group + output, has_output, HAS_OFFSETS)
                if IS_GATED:
                    other_scale, other_offset = _of_group(
                        scales, offsets, group + other_line, has_output, HAS_OFFSETS
                    )
            own = packed if BITS == 8 else (packed >> 4 * half) & 15
            factors = _values(own, scale, offset, ZERO, FLOAT_BITS, HAS_OFFSETS, ARE_MINIMA)
            factors = factors.to(x.dtype.element_ty).to(DOT)
            total = tl.dot(factors, part, total, input_precision="ieee")
            if IS_GATED:
                own = other_packed if BITS == 8 else (other_packed >> 4 * half) & 15
                factors = _values(
                    own, other_scale, other_offset, ZERO, FLOAT_BITS, HAS_OFFSETS, ARE_MINIMA
                )
                factors = factors.to(x.dtype.element_ty).to(DOT)
                other = tl.dot(factors, part, other, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + output, mask=has_output, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            added = tl.load(bias + other_line, mask=has_output, other=0.0)
            other += added.to(tl.float32)[:, None]
    if IS_GATED:
        total = activated(total, IS_GELU) * other
    at_out = out + row.to(tl.int64)[:, None] * stride_out + output[None, :]
    rounded = tl.trans(total).to(out.dtype.element_ty)
    tl.store(at_out, rounded, mask=has_row[:, None] & has_output[None, :])


@triton.jit
def widen_quantized(
    codes, scales, offsets, out, num_lines, num_inputs, stride_codes,
    BITS: tl.constexpr, FLOAT_BITS: tl.constexpr, ZERO: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    ARE_MINIMA: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Program (lines, tile): values of a tile of some lines, [num_lines, num_inputs], in the order
    of the codes."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    at = tl.program_id(1) * TILE
    number = tl.arange(0, TILE)
    has_line, wide_line = line < num_lines, line.to(tl.int64)
    codes_at = codes + wide_line[:, None] * stride_codes + at + number[None, :]
    packed = tl.load(codes_at, mask=has_line[:, None], other=0)
    for half in tl.static_range(8 // BITS):  # pyright: ignore[reportGeneralTypeIssues]
        first = at * (8 // BITS) + half * TILE
        group = 0
        if GROUP:
            group = first // GROUP * num_lines
        scale, offset = _of_group(scales, offsets, group + line, has_line, HAS_OFFSETS)
        own = packed if BITS == 8 else (packed >> 4 * half) & 15
        values = _values(own, scale, offset, ZERO, FLOAT_BITS, HAS_OFFSETS, ARE_MINIMA)
        is_in = has_line[:, None] & (first + number < num_inputs)[None, :]
        at_out = out + wide_line[:, None] * num_inputs + first + number[None, :]
        tl.store(at_out, values.to(out.dtype.element_ty), mask=is_in)


# Codes of a line that are multiplied at once, by the bytes of a number: values are in registers, of
# float32 the other factors too.
MOST_INPUTS = {2: 64, 4: 16}
# Of a program: more where two sums of 128 rows would not fit the registers.
WARPS, MOST_WARPS = 4, 8
LINES = 32
# Without fused multiply-adds, values have the bits of those that torch computes.
LAUNCH = {"enable_fp_fusion": False}


def quantized_linear(
    x: Tensor, weight: KeptWeight, bias: Tensor | None = None, *,
    activation: str | None = None, out_dtype: torch.dtype | None = None,
    row_tile: int | None = None,
) -> Tensor:  # fmt: skip
    """`x` [rows, inputs] times a quantised weight; see `kernels/quantized/reference.py`."""
    num_rows, num_lines, is_gated = len(x), len(weight.codes), activation is not None
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if row_tile is None and num_rows > MOST_QUANTIZED_ROWS:
        assert not is_gated
        return library_linear(x, widened(weight, x.dtype), bias, out_dtype=out_dtype)
    num_outputs = num_lines // 2 if is_gated else num_lines
    out = x.new_empty(num_rows, num_outputs, dtype=out_dtype)
    if not num_rows:
        return out
    assert x.shape[1] == weight.num_inputs
    assert x.stride(1) == 1
    sizes = tile_sizes(row_tile or num_rows, weight.tile, x.dtype)
    num_programs = triton.cdiv(num_outputs, OUTPUTS)
    multiply_quantized[num_programs, triton.cdiv(num_rows, sizes["ROWS"])](
        x, weight.codes, weight.scales, _or_scales(weight), out if bias is None else bias, out,
        num_rows, num_outputs, num_lines, weight.num_inputs,
        x.stride(0), weight.codes.stride(0), out.stride(0), **form(weight),
        IS_WHOLE=weight.num_inputs * weight.bits == weight.codes.shape[1] * 8,
        HAS_BIAS=bias is not None, IS_GATED=is_gated, IS_GELU=activation == "gelu_tanh",
        DOT=dot_type(x.dtype), **sizes,
        num_stages=num_stages(
            x.device, num_programs, tile_bytes(sizes, weight.bits, x.dtype, is_gated=is_gated),
            is_gated=is_gated,
        ),
        num_warps=num_warps(sizes["ROWS"], is_gated=is_gated),
        **dependent_launch(x.device), **LAUNCH,
    )  # fmt: skip
    return out


def widened(weight: KeptWeight, dtype: torch.dtype) -> Tensor:
    """The values [outputs, inputs], the inputs in the order of the codes."""
    num_lines, num_bytes = weight.codes.shape
    out = weight.scales.new_empty(num_lines, weight.num_inputs, dtype=dtype)
    grid = triton.cdiv(num_lines, LINES), num_bytes // weight.tile
    widen_quantized[grid](
        weight.codes, weight.scales, _or_scales(weight), out, num_lines, weight.num_inputs,
        num_bytes, **form(weight), LINES=LINES, **LAUNCH,
    )  # fmt: skip
    return out


def _or_scales(weight: KeptWeight) -> Tensor:
    return weight.scales if weight.offsets is None else weight.offsets


def form(weight: KeptWeight) -> dict[str, int]:
    """Constants of a weight."""
    return {
        "BITS": weight.bits, "FLOAT_BITS": weight.bits if weight.kind in FLOATS else 0,
        "ZERO": weight.zero,
        "HAS_OFFSETS": weight.offsets is not None, "ARE_MINIMA": weight.are_minima,
        "GROUP": weight.group_size, "TILE": weight.tile,
    }  # fmt: skip


def tile_sizes(num_rows: int, tile: int, dtype: torch.dtype) -> dict[str, int]:
    """ROWS, OUTPUTS and INPUTS of a program. Neither of the last two depends on the rows, and so
    the order of sums does not."""
    return {
        "ROWS": max(triton.next_power_of_2(num_rows), LEAST_ROWS),
        "OUTPUTS": OUTPUTS,
        "INPUTS": min(tile, MOST_INPUTS[dtype.itemsize]),
    }


def num_warps(row_tile: int, *, is_gated: bool) -> int:
    """Of a program."""
    return MOST_WARPS if is_gated and row_tile > 64 else WARPS


def tile_bytes(sizes: dict[str, int], bits: int, dtype: torch.dtype, *, is_gated: bool) -> int:
    """Shared memory of a tile of codes, and of its inputs of all rows."""
    codes = sizes["OUTPUTS"] * (2 if is_gated else 1)
    inputs = sizes["ROWS"] * dtype.itemsize * (8 // bits)
    return (codes + inputs) * sizes["INPUTS"]
