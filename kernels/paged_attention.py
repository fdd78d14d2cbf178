"""Attention of all rows of a step over a paged KV cache, in Triton.

Reads each key and value once for all query lines of a tile: the rows of a request times the heads
that share a key. Importing this file needs Triton; `dispatch.py` does it where it is chosen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_spec import LayerSpec
from .step_layout import StepLayout
from .tile_plan import COLUMN_STEP, ITEM_FIELDS, REQUEST_FIELDS

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FIELDS_OF_ITEM = tl.constexpr(ITEM_FIELDS)
FIELDS_OF_REQUEST = tl.constexpr(REQUEST_FIELDS)
# Asked for by name: Triton will change its default, and warns until then.
FUSED = {"enable_fp_fusion": True}
# tl.dot takes no fewer.
LEAST_DIM = 16


@triton.jit
def _soft_bounded(logits, bound):
    """bound * tanh(logits / bound), by an exponential that cannot overflow."""
    ratio = logits / bound
    shrink = tl.exp2(tl.abs(ratio) * (-2.0 * LOG2E))
    size = bound * (1.0 - shrink) / (1.0 + shrink)
    return tl.where(ratio < 0, -size, size)


@triton.jit
def _load_pairs(pairs, slots, seen, dims, dim_ok, stride_slot, stride_value):
    """Keys and values of `slots`; zeros where no row sees them, since 0 * NaN is NaN."""
    offsets = slots.to(tl.int64)[:, None] * stride_slot + dims[None, :]
    mask = seen[:, None] & dim_ok[None, :]
    keys = tl.load(pairs + offsets, mask=mask, other=0.0)
    values = tl.load(pairs + stride_value + offsets, mask=mask, other=0.0)
    return keys, values


@triton.jit
def _fold(
    state, lines, keys, values, visible, logit_scale, softcap,
    HAS_SOFTCAP: tl.constexpr, KEEP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a tile of columns to (weighted sum, weight, largest logit to the base 2) of each line."""
    total, weight, top = state
    logits = tl.dot(lines, tl.trans(keys.to(DOT)), input_precision=PRECISION) * logit_scale
    if HAS_SOFTCAP:
        logits = _soft_bounded(logits, softcap)
    logits = tl.where(visible, logits * LOG2E, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    # A line that has seen nothing yet would subtract infinity from itself.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    shares = tl.exp2(logits - shift[:, None])
    decay = tl.exp2(top - shift)
    weight = weight * decay + tl.sum(shares, 1)
    product = tl.dot(shares.to(KEEP).to(DOT), values.to(DOT), input_precision=PRECISION)
    return total * decay[:, None] + product, weight, new_top


@triton.jit
def attend_tiles(
    query, pairs, out, log_sums, scales, partial_out, partial_sums,
    items, requests, positions, ancestors, own_slots, own_positions, first_blocks, blocks,
    scaling, window, softcap,
    stride_query_row, stride_query_head, stride_slot, stride_value, stride_kv_head,
    stride_out_row, stride_out_head, stride_sums_row,
    BLOCK_SIZE: tl.constexpr, SHARE: tl.constexpr, NUM_WORDS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
    PARTIAL_LINES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_SUMS: tl.constexpr, KEEP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (item, kv head): one item's lines over its part of the context and own columns."""
    item = items + tl.program_id(0) * FIELDS_OF_ITEM
    kv_head = tl.program_id(1)
    request = tl.load(item)
    if request < 0:
        return
    first_row = tl.load(item + 1)
    num_rows = tl.load(item + 2)
    begin = tl.load(item + 3)
    end = tl.load(item + 4)
    num_own = tl.load(item + 5)
    partial = tl.load(item + 6)
    facts = requests + request * FIELDS_OF_REQUEST
    line = tl.arange(0, LINES)
    row_in_tile = line // SHARE
    head = kv_head * SHARE + line % SHARE
    is_line = row_in_tile < num_rows
    row = first_row + row_in_tile
    dims = tl.arange(0, DIMS)
    dim_ok = dims < HEAD_DIM
    at_query = row.to(tl.int64)[:, None] * stride_query_row + head[:, None] * stride_query_head
    line_mask = is_line[:, None] & dim_ok[None, :]
    lines = tl.load(query + at_query + dims[None, :], mask=line_mask, other=0.0).to(DOT)
    position = tl.load(positions + row, mask=is_line, other=2147483647)
    if HAS_WINDOW:
        earliest = tl.min(position, 0) - window + 1
        begin = tl.maximum(begin, earliest)
    pairs += kv_head * stride_kv_head
    logit_scale = scaling
    if HAS_SCALES:
        logit_scale = scaling * tl.load(scales + kv_head)
    total = tl.zeros([LINES, DIMS], dtype=tl.float32)
    weight = tl.zeros([LINES], dtype=tl.float32)
    top = tl.full([LINES], float("-inf"), dtype=tl.float32)
    span = tl.arange(0, COLUMNS)

    table = blocks + tl.load(first_blocks + request)
    for start in range(begin, end, COLUMNS):
        column = start + span
        seen = column < end
        block = tl.load(table + column // BLOCK_SIZE, mask=seen, other=0)
        slots = block.to(tl.int64) * BLOCK_SIZE + column % BLOCK_SIZE
        keys, values = _load_pairs(pairs, slots, seen, dims, dim_ok, stride_slot, stride_value)
        visible = seen[None, :] & is_line[:, None]
        if HAS_WINDOW:
            visible = visible & (position[:, None] - column[None, :] < window)
        total, weight, top = _fold(
            (total, weight, top), lines, keys, values, visible, logit_scale, softcap,
            HAS_SOFTCAP, KEEP, DOT, PRECISION,
        )  # fmt: skip

    first_own = tl.load(facts + 3)
    is_causal = tl.load(facts + 5)
    row_of_request = row - tl.load(facts)
    for start in range(0, num_own, COLUMNS):
        column = start + span
        is_column = column < num_own
        if is_causal == 1:
            visible = column[None, :] <= row_of_request[:, None]
        else:
            # One word holds the bits of the whole tile of columns.
            at_word = row.to(tl.int64) * NUM_WORDS + start // 64
            word = tl.load(ancestors + at_word, mask=is_line, other=0)
            visible = ((word[:, None] >> (column % 64).to(tl.int64)[None, :]) & 1) == 1
        visible = visible & is_column[None, :] & is_line[:, None]
        if HAS_WINDOW:
            where = tl.load(own_positions + first_own + column, mask=is_column, other=0)
            visible = visible & (position[:, None] - where[None, :] < window)
        seen = tl.max(visible.to(tl.int32), 0) > 0
        slots = tl.load(own_slots + first_own + column, mask=is_column, other=0)
        keys, values = _load_pairs(pairs, slots, seen, dims, dim_ok, stride_slot, stride_value)
        total, weight, top = _fold(
            (total, weight, top), lines, keys, values, visible, logit_scale, softcap,
            HAS_SOFTCAP, KEEP, DOT, PRECISION,
        )  # fmt: skip

    is_empty = weight == 0
    safe_weight = tl.where(is_empty, 1.0, weight)
    result = total / safe_weight[:, None]
    if HAS_SCALES:
        result *= tl.load(scales + tl.num_programs(1) + kv_head)
    sums = tl.where(is_empty, float("-inf"), top + tl.log2(safe_weight))
    if partial >= 0:
        at = (partial * tl.num_programs(1) + kv_head).to(tl.int64) * PARTIAL_LINES + line
        tl.store(partial_sums + at, sums, mask=is_line)
        tl.store(partial_out + at[:, None] * HEAD_DIM + dims[None, :], result, mask=line_mask)
    else:
        at_out = row.to(tl.int64)[:, None] * stride_out_row + head[:, None] * stride_out_head
        tl.store(out + at_out + dims[None, :], result.to(KEEP), mask=line_mask)
        if HAS_SUMS:
            tl.store(log_sums + row * stride_sums_row + head, sums * LN2, mask=is_line)


@triton.jit
def merge_partials(
    out, log_sums, partial_out, partial_sums, merges,
    stride_out_row, stride_out_head, stride_sums_row,
    SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    PARTIAL_LINES: tl.constexpr, HAS_SUMS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Program (row, head): the partial results of a split tile become one, by log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(merges + row * 3)
    count = tl.load(merges + row * 3 + 1)
    if count == 0:
        return
    num_kv_heads = tl.num_programs(1) // SHARE
    line = tl.load(merges + row * 3 + 2) * SHARE + head % SHARE
    dims = tl.arange(0, DIMS)
    dim_ok = dims < HEAD_DIM
    total = tl.zeros([DIMS], dtype=tl.float32)
    weight = 0.0
    top = float("-inf")
    for index in range(0, count):
        owner = (first + index) * num_kv_heads + head // SHARE
        at = owner.to(tl.int64) * PARTIAL_LINES + line
        log_sum = tl.load(partial_sums + at)
        part = tl.load(partial_out + at * HEAD_DIM + dims, mask=dim_ok, other=0.0)
        new_top = tl.maximum(top, log_sum)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay = tl.exp2(top - shift)
        share = tl.exp2(log_sum - shift)
        total = total * decay + part * share
        weight = weight * decay + share
        top = new_top
    is_empty = weight == 0
    safe_weight = tl.where(is_empty, 1.0, weight)
    result = (total / safe_weight).to(KEEP)
    tl.store(out + row * stride_out_row + head * stride_out_head + dims, result, mask=dim_ok)
    if HAS_SUMS:
        sums = tl.where(is_empty, float("-inf"), (top + tl.log2(safe_weight)) * LN2)
        tl.store(log_sums + row * stride_sums_row + head, sums)


def paged_attention(
    query: Tensor, pairs: Tensor, layout: StepLayout, spec: LayerSpec,
    out: Tensor, log_sums: Tensor | None = None,
) -> None:  # fmt: skip
    """As `attention_reference.paged_attention`, which says what it does."""
    shape, partials = layout.shape, layout.partials
    assert query.stride(2) == out.stride(2) == pairs.stride(3) == 1
    assert layout.block_size * pairs.stride(0) < 2**31  # what Triton takes for a 32-bit product
    sums = out if log_sums is None else log_sums
    dims = max(triton.next_power_of_2(shape.head_dim), LEAST_DIM)
    shared = {
        "SHARE": shape.share, "HEAD_DIM": shape.head_dim, "DIMS": dims,
        "PARTIAL_LINES": partials.sums.shape[2], "HAS_SUMS": log_sums is not None,
        "KEEP": _triton_type(out.dtype),
    }  # fmt: skip
    attend_tiles[layout.launch_items, shape.num_kv_heads](
        query, pairs, out, sums, out if spec.scales is None else spec.scales,
        partials.out, partials.sums,
        layout.items, layout.requests, layout.positions, layout.ancestors,
        layout.own_slots, layout.own_positions, layout.first_blocks, layout.blocks,
        spec.scaling, spec.window or 0, spec.softcap or 0.0,
        query.stride(0), query.stride(1), pairs.stride(0), pairs.stride(1), pairs.stride(2),
        out.stride(0), out.stride(1), sums.stride(0),
        BLOCK_SIZE=layout.block_size, NUM_WORDS=layout.capacity.num_words,
        LINES=max(layout.tile_lines, LEAST_DIM),
        HAS_WINDOW=spec.window is not None, HAS_SOFTCAP=spec.softcap is not None,
        HAS_SCALES=spec.scales is not None,
        **shared, **tile_options(dims, query.dtype), **FUSED,
    )  # fmt: skip
    if layout.has_partials:
        merge_partials[layout.launch_rows, shape.num_heads](
            out, sums, partials.out, partials.sums, layout.merges,
            out.stride(0), out.stride(1), sums.stride(0), **shared, **FUSED,
        )  # fmt: skip


def tile_options(dims: int, dtype: torch.dtype) -> dict[str, object]:
    """How tiles are computed: fewer columns where a row of keys is long, to fit shared memory."""
    row_bytes = dims * dtype.itemsize
    # The interpreter multiplies bfloat16 as if it were integers.
    exact = dtype == torch.float32
    interpreted = triton.knobs.runtime.interpret
    return {
        "COLUMNS": COLUMN_STEP if row_bytes <= 256 else 32,
        "DOT": tl.float32 if interpreted else _triton_type(dtype),
        "PRECISION": "ieee" if exact else "tf32",
        "num_warps": 8 if row_bytes > 256 else 4,
        "num_stages": 1 if row_bytes > 512 else 2,
    }


def _triton_type(dtype: torch.dtype) -> tl.dtype:
    return {
        torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
    }[dtype]  # fmt: skip
