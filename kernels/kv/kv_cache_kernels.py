"""Triton kernels that write and copy slots of a KV cache. Importing this file needs Triton."""

# Triton accepts plain numbers for constexpr parameters, whatever their annotation.
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..row_scales import are_by_row
from .reference import ABOVE_FP8_MANTISSA, FP8_EXPONENT, LARGEST_FP8

FP8_BOUND = tl.constexpr(LARGEST_FP8)
MANTISSA_STEP = tl.constexpr(ABOVE_FP8_MANTISSA)
EXPONENT = tl.constexpr(FP8_EXPONENT)


@triton.jit
def row_scales(largest):
    """The scale of a row with this largest magnitude, float32: `row_scales` of `reference.py`."""
    exponents = ((largest.to(tl.int32, bitcast=True) + MANTISSA_STEP) >> 23) - EXPONENT
    return (tl.maximum(exponents, 1) << 23).to(tl.float32, bitcast=True)


@triton.jit
def as_stored(numbers, scale, HAS_SCALES: tl.constexpr, IS_FP8: tl.constexpr):
    """Numbers over their scale, clamped to the cache's range; the caller converts the dtype."""
    if HAS_SCALES:
        numbers = numbers.to(tl.float32) / scale
    if IS_FP8:
        bounded = tl.minimum(numbers.to(tl.float32), FP8_BOUND)
        numbers = tl.maximum(bounded, -FP8_BOUND)
    return numbers


@triton.jit
def store_rows(
    keys, values, pairs, slots, scales, stride_row, stride_head, stride_value_row,
    stride_value_head, stride_slot, stride_half, stride_pair_head,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    HAS_SCALES: tl.constexpr, BY_ROW: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """Program (row, half): all heads of a row's key (half 0) or value (half 1)."""
    row = tl.program_id(0)
    half = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, DIMS)[None, :]
    mask = (head < NUM_HEADS) & (dim < HEAD_DIM)
    wide_row = row.to(tl.int64)
    if half == 0:
        at = keys + wide_row * stride_row + head * stride_head + dim
        numbers = tl.load(at, mask=mask, other=0.0)
    else:
        at = values + wide_row * stride_value_row + head * stride_value_head + dim
        numbers = tl.load(at, mask=mask, other=0.0)
    scale = 1.0
    at_scale = scales + half * NUM_HEADS + head
    if HAS_SCALES:
        scale = tl.load(at_scale, mask=head < NUM_HEADS, other=1.0)
    if BY_ROW:
        scale = row_scales(tl.max(tl.abs(numbers.to(tl.float32)), axis=1))[:, None]
        tl.store(at_scale + slot * 2 * NUM_HEADS, scale, mask=head < NUM_HEADS)
    numbers = as_stored(numbers, scale, HAS_SCALES or BY_ROW, IS_FP8)
    at_pair = pairs + slot * stride_slot + half * stride_half + head * stride_pair_head + dim
    tl.store(at_pair, numbers.to(pairs.dtype.element_ty), mask=mask)


@triton.jit
def copy_rows(
    source, target, source_rows, target_rows, stride_index, row_len,
    stride_source, stride_target, stride_source_layer, stride_target_layer,
    FROM_LIST: tl.constexpr, TO_LIST: tl.constexpr, CHUNK_LEN: tl.constexpr,
):  # fmt: skip
    """Program (copy, layer, chunk): part of a row; without a list, copy i is of or to row i."""
    index = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    number = tl.program_id(2) * CHUNK_LEN + tl.arange(0, CHUNK_LEN)
    read = tl.load(source_rows + index * stride_index).to(tl.int64)
    write = tl.load(target_rows + index * stride_index).to(tl.int64)
    if read < 0:
        return
    if not FROM_LIST:
        read = index.to(tl.int64)
    if not TO_LIST:
        write = index.to(tl.int64)
    mask = number < row_len
    begin = layer * stride_source_layer + read * stride_source
    numbers = tl.load(source + begin + number, mask=mask)
    tl.store(target + layer * stride_target_layer + write * stride_target + number, numbers, mask)


# Numbers that one program copies.
CHUNK = 1024
# Set explicitly: Triton warns that its default will change.
FUSED = {"enable_fp_fusion": True}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def write_kv(
    keys: Tensor, values: Tensor, pairs: Tensor, slots: Tensor, scales: Tensor | None = None
) -> None:
    """Store keys and values of rows in their slots; see `kernels/kv/reference.py`."""
    num_rows, num_heads, head_dim = keys.shape
    assert keys.stride(2) == values.stride(2) == pairs.stride(3) == 1
    if not num_rows:
        return
    by_row = are_by_row(scales)
    store_rows[num_rows, pairs.shape[1]](
        keys, values, pairs, slots, pairs if scales is None else scales,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        pairs.stride(0), pairs.stride(1), pairs.stride(2),
        NUM_HEADS=num_heads, HEADS=triton.next_power_of_2(num_heads),
        HEAD_DIM=head_dim, DIMS=triton.next_power_of_2(head_dim),
        HAS_SCALES=scales is not None and not by_row, BY_ROW=by_row,
        IS_FP8=pairs.dtype == torch.float8_e4m3fn, **FUSED,
    )  # fmt: skip


def move_kv(data: Tensor, moves: Tensor) -> None:
    """Copy slots of a cache in all layers; see `kernels/kv/reference.py`."""
    if not len(data):
        # A stage of layers that keep states has none with keys.
        return
    slots = _as_rows(data, 1)
    # Copies through a buffer: programs run in any order, and a slot may be both read and written.
    between = slots.new_empty(slots.shape[0], len(moves), slots.shape[2])
    _copy(slots, between, moves, from_list=True, to_list=False)
    _copy(between, slots, moves, from_list=False, to_list=True)


def _as_rows(data: Tensor, slots_per_row: int) -> Tensor:
    """The cache as integers of up to four bytes, [layers, rows, numbers]."""
    assert data[0].is_contiguous()
    row_bytes = data[0, 0].numel() * data.dtype.itemsize * slots_per_row
    width = next(size for size in (4, 2, 1) if row_bytes % size == 0)
    raw = data.flatten(2).view(INTEGERS[width])
    return raw.view(raw.shape[0], -1, row_bytes // width)


def _copy(source: Tensor, target: Tensor, pairs: Tensor, *, from_list: bool, to_list: bool) -> None:
    if not len(pairs):
        return
    row_len = source.shape[2]
    chunk = min(CHUNK, triton.next_power_of_2(row_len))
    copy_rows[len(pairs), source.shape[0], triton.cdiv(row_len, chunk)](
        source, target, pairs[:, 0], pairs[:, 1], pairs.stride(0), row_len,
        source.stride(1), target.stride(1), source.stride(0), target.stride(0),
        FROM_LIST=from_list, TO_LIST=to_list, CHUNK_LEN=chunk, **FUSED,
    )  # fmt: skip
