"""Operators on a KV cache, in Triton. Importing this file needs Triton."""

# Triton accepts plain numbers for constexpr parameters, whatever their annotation.
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..row_scales import are_by_row
from .kv_cache_kernels import copy_rows, store_rows

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
    store_rows[num_rows, 2](
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
    slots = _as_rows(data, 1)
    # Copies through a buffer: programs run in any order, and a slot may be both read and written.
    between = slots.new_empty(slots.shape[0], len(moves), slots.shape[2])
    _copy(slots, between, moves, from_list=True, to_list=False)
    _copy(between, slots, moves, from_list=False, to_list=True)


def _as_rows(data: Tensor, slots_per_row: int) -> Tensor:
    """The cache as integers of up to four bytes, [layers, rows, numbers]."""
    assert data.is_contiguous()
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
