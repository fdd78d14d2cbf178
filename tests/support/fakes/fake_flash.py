"""`flash_attn.flash_attn_varlen_func` of flash-attn 2.8, computed in torch for paged KV."""

from __future__ import annotations

import math

import torch
from torch import Tensor

PAGE = 256


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:  # fmt: skip
    """Masks are aligned at the last row and column; a row that sees nothing has a sum of +inf."""
    assert block_table is not None
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
    assert block_table.is_contiguous()
    assert k.shape[1] % PAGE == 0
    assert k.stride(-1) == v.stride(-1) == q.stride(-1) == 1
    out = torch.zeros_like(q)
    sums = torch.full((q.shape[1], q.shape[0]), math.inf)
    bounds = zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k.diff(), strict=True)
    for request, (first, last, num_columns) in enumerate(bounds):
        num_rows = int(last - first)
        assert num_rows <= max_seqlen_q
        assert num_columns <= max_seqlen_k
        pages = block_table[request].long()
        share = q.shape[1] // k.shape[2]
        keys, values = (
            cache[pages].flatten(0, 1)[:num_columns].float().repeat_interleave(share, 1)
            for cache in (k, v)
        )
        rows = torch.arange(num_rows)[:, None] + int(num_columns) - num_rows
        columns = torch.arange(int(num_columns))
        hidden = torch.zeros(num_rows, int(num_columns), dtype=torch.bool)
        left, right = window_size[0], 0 if causal else window_size[1]
        if left >= 0:
            hidden |= columns < rows - left
        if right >= 0:
            hidden |= columns > rows + right
        scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
        logits = torch.einsum("rhd,chd->hrc", q[first:last].float(), keys) * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(hidden, -math.inf)
        if num_columns:
            sums[:, first:last] = torch.logsumexp(logits, -1)
            out[first:last] = torch.einsum("hrc,chd->rhd", logits.softmax(-1), values).to(q.dtype)
    return (out, sums, None) if return_attn_probs else out
