"""Operators on a KV cache, in Triton. Importing this file needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_reference import LARGEST_FP8

FP8_BOUND = tl.constexpr(LARGEST_FP8)
# Numbers that one program copies.
CHUNK = 1024
# Asked for by name: Triton will change its default, and warns until then.
FUSED = {"enable_fp_fusion": True}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@triton.jit
def store_rows(
    keys, values, pairs, slots, scales, stride_row, stride_head, stride_value_row,
    stride_value_head, stride_slot, stride_half, stride_pair_head,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    HAS_SCALES: tl.constexpr, IS_FP8: tl.constexpr,
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
        numbers = tl.load(keys + wide_row * stride_row + head * stride_head + dim, mask=mask)
    else:
        at = wide_row * stride_value_row + head * stride_value_head
        numbers = tl.load(values + at + dim, mask=mask)
    if HAS_SCALES:
        scale = tl.load(scales + half * NUM_HEADS + head, mask=head < NUM_HEADS, other=1.0)
        numbers = numbers.to(tl.float32) / scale
    if IS_FP8:
        bounded = tl.minimum(numbers.to(tl.float32), FP8_BOUND)
        numbers = tl.maximum(bounded, -FP8_BOUND)
    place = pairs + slot * stride_slot + half * stride_half + head * stride_pair_head + dim
    tl.store(place, numbers.to(pairs.dtype.element_ty), mask=mask)


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


def write_kv(
    keys: Tensor, values: Tensor, pairs: Tensor, slots: Tensor, scales: Tensor | None = None
) -> None:
    """As `kv_reference.write_kv`."""
    num_rows, num_heads, head_dim = keys.shape
    assert keys.stride(2) == values.stride(2) == pairs.stride(3) == 1
    if not num_rows:
        return
    store_rows[num_rows, 2](
        keys, values, pairs, slots, pairs if scales is None else scales,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        pairs.stride(0), pairs.stride(1), pairs.stride(2),
        NUM_HEADS=num_heads, HEADS=triton.next_power_of_2(num_heads),
        HEAD_DIM=head_dim, DIMS=triton.next_power_of_2(head_dim),
        HAS_SCALES=scales is not None, IS_FP8=pairs.dtype == torch.float8_e4m3fn, **FUSED,
    )  # fmt: skip


def move_kv(data: Tensor, moves: Tensor) -> None:
    """As `kv_reference.move_kv`."""
    slots = _as_rows(data, 1)
    # A copy in between: programs run in any order, and a slot may be read and written.
    between = slots.new_empty(slots.shape[0], len(moves), slots.shape[2])
    _copy(slots, between, moves, from_list=True, to_list=False)
    _copy(between, slots, moves, from_list=False, to_list=True)


def copy_blocks(data: Tensor, copies: Tensor, block_size: int) -> None:
    """As `kv_reference.copy_blocks`."""
    blocks = _as_rows(data, block_size)
    _copy(blocks, blocks, copies, from_list=True, to_list=True)


def _as_rows(data: Tensor, slots_per_row: int) -> Tensor:
    """The cache as integers of up to four bytes, [layers, rows, numbers]."""
    assert data.is_contiguous()
    row_bytes = data[0, 0].numel() * data.dtype.itemsize * slots_per_row
    width = next(size for size in (4, 2, 1) if row_bytes % size == 0)
    raw = data.flatten(2).view(INTEGERS[width])
    return raw.view(raw.shape[0], -1, row_bytes // width)


def _copy(
    source: Tensor, target: Tensor, pairs: Tensor, *, from_list: bool, to_list: bool
) -> None:
    if not len(pairs):
        return
    row_len = source.shape[2]
    chunk = min(CHUNK, triton.next_power_of_2(row_len))
    copy_rows[len(pairs), source.shape[0], triton.cdiv(row_len, chunk)](
        source, target, pairs[:, 0], pairs[:, 1], pairs.stride(0), row_len,
        source.stride(1), target.stride(1), source.stride(0), target.stride(0),
        FROM_LIST=from_list, TO_LIST=to_list, CHUNK_LEN=chunk, **FUSED,
    )  # fmt: skip
