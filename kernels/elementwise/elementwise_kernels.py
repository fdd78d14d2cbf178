"""Triton kernels around a stage's products. Importing this file needs Triton.

All compute in float32 and round once, when they store.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kv.kv_cache_kernels import as_stored, row_scales
from ..shared_kernels import activated, await_inputs


@triton.jit
def normalise(
    x, residual, scale, out, eps, stride_row, stride_group, stride_residual, stride_out,
    stride_out_group, SIZE: tl.constexpr, WIDTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    DEPENDS: tl.constexpr,
):  # fmt: skip
    """Program (row, group): x / sqrt(mean(x^2) + eps) * scale, after adding the residual to x."""
    await_inputs(DEPENDS)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    number = tl.arange(0, WIDTH)
    mask = number < SIZE
    at = x + row * stride_row + group * stride_group + number
    values = tl.load(at, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        before = tl.load(residual + row * stride_residual + number, mask=mask, other=0.0)
        values = (values.to(tl.float32) + before.to(tl.float32)).to(values.dtype)
        tl.store(at, values, mask=mask)
    values = values.to(tl.float32)
    mean = tl.sum(values * values, axis=0) / SIZE
    factors = tl.load(scale + number, mask=mask, other=0.0)
    result = values * (1.0 / tl.sqrt(mean + eps)) * factors
    at_out = out + row * stride_out + group * stride_out_group + number
    tl.store(at_out, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def turn_heads(
    heads, cos, sin, stride_row, stride_head, stride_angle,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program row: rotate all heads of a row in place. The first half of `sin` is negated."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    number = tl.arange(0, WIDTH)[None, :]
    is_angle = number < HALF
    mask = (head < NUM_HEADS) & is_angle
    at = heads + row * stride_row + head * stride_head + number
    left = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    angle = row * stride_angle + number
    cos_left = tl.load(cos + angle, mask=is_angle, other=0.0).to(tl.float32)
    cos_right = tl.load(cos + angle + HALF, mask=is_angle, other=0.0).to(tl.float32)
    sin_left = tl.load(sin + angle, mask=is_angle, other=0.0).to(tl.float32)
    sin_right = tl.load(sin + angle + HALF, mask=is_angle, other=0.0).to(tl.float32)
    kind = heads.dtype.element_ty
    tl.store(at, (left * cos_left + right * sin_left).to(kind), mask=mask)
    tl.store(at + HALF, (right * cos_right + left * sin_right).to(kind), mask=mask)


@triton.jit
def turn_and_store(
    heads, pairs, slots, cos, sin, norm_scales, kv_scales, eps, stride_row, stride_head,
    stride_angle, stride_slot, stride_half, stride_pair_head,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    HAS_NORMS: tl.constexpr, HAS_SCALES: tl.constexpr, BY_ROW: tl.constexpr,
    IS_FP8: tl.constexpr, DEPENDS: tl.constexpr,
):  # fmt: skip
    """Program (row, head): queries are updated in place; keys and values are stored in
    the cache.

    Queries and keys are normed where the model does so, and rotated. The first half of `sin` is
    negated.
    """
    await_inputs(DEPENDS)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    number = tl.arange(0, WIDTH)
    mask = number < HALF
    kind = heads.dtype.element_ty
    at = heads + row * stride_row + head * stride_head + number
    left = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if head < NUM_HEADS + NUM_KV_HEADS:
        if HAS_NORMS:
            mean = (tl.sum(left * left, axis=0) + tl.sum(right * right, axis=0)) / (2 * HALF)
            factor = 1.0 / tl.sqrt(mean + eps)
            # Scales of keys come after those of queries.
            scale = norm_scales + (head >= NUM_HEADS).to(tl.int32) * 2 * HALF + number
            left *= factor * tl.load(scale, mask=mask, other=0.0)
            right *= factor * tl.load(scale + HALF, mask=mask, other=0.0)
            left, right = left.to(kind).to(tl.float32), right.to(kind).to(tl.float32)
        angle = row * stride_angle + number
        cos_left = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
        cos_right = tl.load(cos + angle + HALF, mask=mask, other=0.0).to(tl.float32)
        sin_left = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
        sin_right = tl.load(sin + angle + HALF, mask=mask, other=0.0).to(tl.float32)
        before = left
        left = left * cos_left + right * sin_left
        right = right * cos_right + before * sin_right
    left, right = left.to(kind), right.to(kind)
    slot = tl.load(slots + row).to(tl.int64)
    if head < NUM_HEADS:
        tl.store(at, left, mask=mask)
        tl.store(at + HALF, right, mask=mask)
    elif slot >= 0:
        of_pair = head - NUM_HEADS
        half = of_pair // NUM_KV_HEADS
        kv_head = of_pair % NUM_KV_HEADS
        scale = 1.0
        if HAS_SCALES:
            scale = tl.load(kv_scales + of_pair)
        if BY_ROW:
            sizes = tl.maximum(tl.abs(left.to(tl.float32)), tl.abs(right.to(tl.float32)))
            scale = row_scales(tl.max(sizes, axis=0))
            tl.store(kv_scales + slot * 2 * NUM_KV_HEADS + of_pair, scale)
        at_pair = pairs + slot * stride_slot + half * stride_half + kv_head * stride_pair_head
        # New names, because Triton variables cannot change their type.
        stored_left = as_stored(left, scale, HAS_SCALES or BY_ROW, IS_FP8)
        stored_right = as_stored(right, scale, HAS_SCALES or BY_ROW, IS_FP8)
        stored = pairs.dtype.element_ty
        tl.store(at_pair + number, stored_left.to(stored), mask=mask)
        tl.store(at_pair + HALF + number, stored_right.to(stored), mask=mask)


@triton.jit
def gate(gate_up, out, size, stride_row, stride_out, IS_GELU: tl.constexpr, LEN: tl.constexpr):
    """Program (row, chunk): activation of the left half times the right half."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * LEN + tl.arange(0, LEN)
    mask = number < size
    at = gate_up + row * stride_row + number
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + size, mask=mask, other=0.0).to(tl.float32)
    result = activated(x, IS_GELU) * up
    tl.store(out + row * stride_out + number, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def take_log_softmax(logits, out, stride_row, stride_out, size, LEN: tl.constexpr):
    """Program row: logits minus the log of the sum of their exponentials.

    Each of `LEN` lanes sums its numbers in order, and the lanes' sums are added in a fixed order.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LEN)
    top = tl.full([LEN], float("-inf"), dtype=tl.float32)
    weight = tl.zeros([LEN], dtype=tl.float32)
    for first in range(0, size, LEN):
        number = first + lane
        values = tl.load(
            logits + row * stride_row + number, mask=number < size, other=float("-inf")
        )
        new_top = tl.maximum(top, values)
        # Avoids infinity minus infinity in a lane that has seen no logit yet.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = weight * tl.exp(top - shift) + tl.exp(values - shift)
        top = new_top
    best = tl.max(top, axis=0)
    log_sum = best + tl.log(tl.sum(weight * tl.exp(top - best), axis=0))
    for first in range(0, size, LEN):
        number = first + lane
        mask = number < size
        values = tl.load(logits + row * stride_row + number, mask=mask, other=0.0)
        tl.store(out + row * stride_out + number, values - log_sum, mask=mask)
