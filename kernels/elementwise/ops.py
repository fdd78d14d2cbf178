"""The elementwise operators between a stage's products, in Triton, one launch each. Importing needs
Triton."""

# Triton accepts plain numbers for constexpr parameters, whatever their annotation.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..row_scales import are_by_row
from ..shared_kernels import dependent_launch
from . import elementwise_kernels
from .elementwise_kernels import gate, normalise, take_log_softmax, turn_heads
from .reference import HeadNorms, KvTarget

# Set explicitly: Triton warns that its default will change.
FUSED = {"enable_fp_fusion": True}
GATE_CHUNK = 1024
# Logits that a program reads at once.
LOGITS_CHUNK = 4096


def rms_norm(
    x: Tensor, scale: Tensor, eps: float, out: Tensor, residual: Tensor | None = None
) -> None:
    """Normalise rows by their root mean square; see `kernels/elementwise/reference.py`."""
    num_rows, size = x.shape[0], x.shape[-1]
    num_groups = x.shape[1] if x.ndim == 3 else 1
    assert x.stride(-1) == out.stride(-1) == scale.stride(0) == 1
    assert residual is None or (x.ndim == 2 and residual.stride(1) == 1)
    if not num_rows:
        return
    normalise[num_rows, num_groups](
        x, x if residual is None else residual, scale, out, eps, x.stride(0), x.stride(-2),
        0 if residual is None else residual.stride(0), out.stride(0), out.stride(-2),
        SIZE=size, WIDTH=triton.next_power_of_2(size), HAS_RESIDUAL=residual is not None,
        num_warps=norm_warps(size), **dependent_launch(x.device), **FUSED,
    )  # fmt: skip


def turn_and_store(
    heads: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, target: KvTarget
) -> None:
    """Rotate queries, and store keys and values; see `kernels/elementwise/reference.py`."""
    num_rows, num_heads, dim = heads.shape
    pairs, kv_heads = target.pairs, target.pairs.shape[2]
    assert heads.stride(2) == cos.stride(2) == sin.stride(2) == pairs.stride(3) == 1
    assert cos.stride(0) == sin.stride(0)
    assert cos.shape == sin.shape == (num_rows, 1, dim)
    if not num_rows:
        return
    by_row = are_by_row(target.scales)
    elementwise_kernels.turn_and_store[num_rows, num_heads](
        heads, pairs, target.slots, cos, sin, cos if norms is None else norms.scales,
        cos if target.scales is None else target.scales, 0.0 if norms is None else norms.eps,
        heads.stride(0), heads.stride(1), cos.stride(0),
        pairs.stride(0), pairs.stride(1), pairs.stride(2),
        NUM_HEADS=num_heads - 2 * kv_heads, NUM_KV_HEADS=kv_heads,
        HALF=dim // 2, WIDTH=triton.next_power_of_2(dim // 2), HAS_NORMS=norms is not None,
        HAS_SCALES=target.scales is not None and not by_row, BY_ROW=by_row,
        IS_FP8=pairs.dtype == torch.float8_e4m3fn,
        num_warps=1, **dependent_launch(heads.device), **FUSED,
    )  # fmt: skip


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads in place; see `kernels/elementwise/reference.py`."""
    num_rows, num_heads, dim = heads.shape
    assert heads.stride(2) == cos.stride(2) == sin.stride(2) == 1
    assert cos.stride(0) == sin.stride(0)
    assert cos.shape == sin.shape == (num_rows, 1, dim)
    if not num_rows:
        return
    turn_heads[num_rows,](
        heads, cos, sin, heads.stride(0), heads.stride(1), cos.stride(0),
        NUM_HEADS=num_heads, HEADS=triton.next_power_of_2(num_heads),
        HALF=dim // 2, WIDTH=triton.next_power_of_2(dim // 2), **FUSED,
    )  # fmt: skip


def gated(gate_up: Tensor, out: Tensor, activation: str) -> None:
    """Store the gated activation in `out`; see `kernels/elementwise/reference.py`."""
    num_rows, size = out.shape
    assert gate_up.stride(1) == out.stride(1) == 1
    if not num_rows:
        return
    gate[num_rows, triton.cdiv(size, GATE_CHUNK)](
        gate_up, out, size, gate_up.stride(0), out.stride(0),
        IS_GELU=activation == "gelu_tanh", LEN=GATE_CHUNK, **FUSED,
    )  # fmt: skip


def log_softmax(logits: Tensor, out: Tensor) -> None:
    """Store log-probabilities in `out`; see `kernels/elementwise/reference.py`."""
    num_rows, size = logits.shape
    assert logits.stride(1) == out.stride(1) == 1
    if not num_rows:
        return
    take_log_softmax[num_rows,](
        logits, out, logits.stride(0), out.stride(0), size,
        LEN=min(triton.next_power_of_2(size), LOGITS_CHUNK), num_warps=8, **FUSED,
    )  # fmt: skip


def norm_warps(size: int) -> int:
    """Warps of a row: eight numbers a thread, up to a useful maximum."""
    return min(max(triton.next_power_of_2(size) // 256, 1), 16)
