"""Attention by the package flash-attn where it has no mask to apply, else by `paged_attention`.

FlashAttention computes prompt chunks whole, and for trees the committed context. `paged_attention`
computes the trees' own columns, and both results are merged by log-sum-exp. With a sliding window
`paged_attention` computes trees whole, since FlashAttention counts distances in rows and not in
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Int32
from ...core.steps import StepInput
from .spec import LayerSpec
from .step_layout import StepLayout

# `flash_attn.flash_attn_varlen_func`, or a replacement in tests.
FlashFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class FlashCall:
    """Requests of one call of FlashAttention.

    rows         int64 [rows] their rows of the step, request by request
    query_starts int32 [requests + 1]  of each request's rows in `rows`
    key_starts   int32 [requests + 1]  of its columns; cached ones are in `block_table`
    block_table  int32 [requests, blocks]
    is_causal    whether the columns end with the rows themselves
    """

    rows: Tensor
    query_starts: Tensor
    key_starts: Tensor
    block_table: Tensor
    block_size: int
    most_rows: int
    most_columns: int
    is_causal: bool


@dataclass(frozen=True, slots=True)
class FlashOps:
    """`flash_attn_varlen_func`, and draftline's `paged_attention` for what it cannot do."""

    flash: FlashFunction
    ours: Callable[..., None]


@dataclass(frozen=True, slots=True, eq=False)
class FlashWork:
    """A step's calls of FlashAttention, and the remaining work of `paged_attention`.

    chunks       prompt chunks; None: there are none
    contexts     committed contexts of trees; None: there are none
    trees        the tree requests whole
    own_columns  the tree requests without their context
    """

    chunks: FlashCall | None
    contexts: FlashCall | None
    trees: StepLayout
    own_columns: StepLayout


def plan_flash(
    step: StepInput, block_size: int, trees: StepLayout, own_columns: StepLayout
) -> FlashWork:
    """Assign the requests of a step to the kernels; refills both layouts, which must be large
    enough."""
    is_tree = np.array([tree is not None for tree in step.trees], dtype=np.bool_)
    has_rows = np.diff(step.request_starts) > 0
    of_trees = np.flatnonzero(is_tree & has_rows)
    of_chunks = np.flatnonzero(~is_tree & has_rows)
    trees.refill(step, of_trees.tolist())
    own_columns.refill(
        replace(step, context_lens=np.zeros_like(step.context_lens)), of_trees.tolist()
    )
    device = trees.positions.device
    chunks = _call(step, of_chunks, block_size, device, is_causal=True)
    return FlashWork(
        chunks, _call(step, of_trees, block_size, device, is_causal=False), trees, own_columns
    )


def flash_attention(
    ops: FlashOps, work: FlashWork, query: Tensor, pairs: Tensor, spec: LayerSpec
) -> Tensor:
    """Attention of the whole step, [rows, heads, head_dim]: what `ops.ours` alone would compute."""
    out = torch.empty_like(query)
    if work.chunks is not None:
        out[work.chunks.rows], _ = _run(ops.flash, work.chunks, query, pairs, spec)
    if work.contexts is None:
        return out
    if spec.window is not None:
        ops.ours(query, pairs, work.trees, spec, out)
        return out
    rows = work.contexts.rows
    context, context_sums = _run(ops.flash, work.contexts, query, pairs, spec)
    sums = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    ops.ours(query, pairs, work.own_columns, spec, out, log_sums=sums)
    out[rows] = merge_results(out[rows], sums[rows], context, context_sums)
    return out


def _run(
    flash: FlashFunction, call: FlashCall, query: Tensor, pairs: Tensor, spec: LayerSpec
) -> tuple[Tensor, Tensor]:
    """Results [rows, heads, head_dim] and their log-sums [rows, heads] of one call."""
    assert spec.scales is None, "FlashAttention 2 reads no FP8"
    keys, values = pairs.unflatten(0, (-1, call.block_size)).unbind(2)
    window = (-1, -1) if spec.window is None else (spec.window - 1, 0)
    out, sums, _ = flash(
        query[call.rows], keys, values, call.query_starts, call.key_starts,
        call.most_rows, call.most_columns, softmax_scale=spec.scaling, causal=call.is_causal,
        window_size=window, softcap=spec.softcap or 0.0, return_attn_probs=True,
        block_table=call.block_table,
    )  # fmt: skip
    return out, sums.transpose(0, 1)


def _call(
    step: StepInput, requests: Sequence[int] | np.ndarray, block_size: int, device: torch.device,
    *, is_causal: bool,
) -> FlashCall | None:  # fmt: skip
    if not len(requests):
        return None
    starts, ends = step.request_starts[:-1][requests], step.request_starts[1:][requests]
    columns = step.context_lens[requests] + (ends - starts if is_causal else 0)
    rows = np.concatenate([np.arange(*bounds) for bounds in zip(starts, ends, strict=True)])
    most_columns = int(columns.max())
    table = step.block_tables[requests, : max(-(-most_columns // block_size), 1)]

    def tensor(values: np.ndarray, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device, dtype)

    return FlashCall(
        tensor(rows, torch.int64),
        tensor(_bounds(ends - starts)),
        tensor(_bounds(columns)),
        tensor(table),
        block_size,
        int((ends - starts).max()),
        most_columns,
        is_causal,
    )


def _bounds(lens: Int32) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lens)))


def merge_results(first: Tensor, first_sums: Tensor, second: Tensor, second_sums: Tensor) -> Tensor:
    """Attention over both sets; results [rows, heads, head_dim], sums float32 [rows, heads].

    Sums are natural logs of sums of exponentials of logits. A row that sees nothing has -inf, or
    FlashAttention's +inf. Results are zero where a row sees nothing in either set.
    """
    sums = torch.stack((first_sums, second_sums))
    sums = torch.where(sums == torch.inf, -torch.inf, sums)
    top = sums.amax(dim=0)
    weights = torch.exp(sums - torch.where(top == -torch.inf, 0.0, top))
    shares = weights / weights.sum(dim=0).clamp(min=1.0)
    merged = first.float() * shares[0, ..., None] + second.float() * shares[1, ..., None]
    return merged.to(first.dtype)
