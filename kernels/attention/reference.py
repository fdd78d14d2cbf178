"""What `paged_attention` computes, in plain torch, request by request."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.tree.tree import WORD_BITS
from ..row_scales import are_by_row
from .spec import LayerSpec
from .step_layout import StepLayout


def paged_attention(
    query: Tensor, pairs: Tensor, layout: StepLayout, spec: LayerSpec,
    out: Tensor, *, log_sums: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the attention of `query` [rows, heads, head_dim + rotated_dim] over what each row sees
    to `out` [rows, heads, head_dim].

    `pairs` [slots, 2, kv_heads, head_dim] are the layer's keys and values, the step's own included;
    FP8 ones are multiplied by `spec.scales`. Latents are [slots, 1, kv_heads, head_dim +
    rotated_dim], not in FP8. Slots that no row sees may have any content. Sums are
    taken in float32. A row that sees nothing gets zeros. `log_sums` float32 [rows, heads] gets the
    natural log of the sum of exponentials of the row's logits. Rows that are not part of the layout
    are left as they are, in both.
    """
    shape = layout.shape
    for request, fields in enumerate(layout.requests.tolist()):
        first, num_rows, *_ = fields
        if not num_rows:
            continue
        rows = slice(first, first + num_rows)
        slots, visible = _columns(layout, request, spec.window)
        seen = visible.any(dim=0)
        sides = pairs[slots].float().masked_fill(~seen[:, None, None, None], 0)
        keys, values = sides[:, 0], sides[:, -1, :, : shape.head_dim]
        if spec.scales is not None:
            scales = spec.scales[slots] if are_by_row(spec.scales) else spec.scales
            key_scales, value_scales = scales[..., None].unbind(-3)
            keys, values = keys * key_scales, values * value_scales
        lines = query[rows].float().unflatten(1, (shape.num_kv_heads, shape.share))
        logits = torch.einsum("rksd,ckd->rksc", lines, keys) * spec.scaling
        if spec.softcap is not None:
            logits = torch.tanh(logits / spec.softcap) * spec.softcap
        logits = logits.masked_fill(~visible[:, None, None, :], -torch.inf)
        sums = torch.logsumexp(logits, dim=-1)
        weights = torch.exp(logits - sums[..., None].masked_fill(sums[..., None].isinf(), 0))
        result = torch.einsum("rksc,ckd->rksd", weights, values)
        out[rows] = result.reshape(num_rows, -1, shape.head_dim).to(out.dtype)
        if log_sums is not None:
            log_sums[rows] = sums.reshape(num_rows, -1)


def _columns(layout: StepLayout, request: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Slots of all columns of a request, and which of its rows sees which: bool [rows, columns]."""
    first, num_rows, context_len, first_own, num_own, is_causal = layout.requests[request].tolist()
    device = layout.requests.device
    positions = torch.arange(context_len, device=device)
    first_block = int(layout.first_blocks[request])
    blocks = layout.blocks[first_block + positions // layout.block_size]
    own_column = torch.arange(num_own, device=device)
    slots = torch.cat(
        (
            blocks * layout.block_size + positions % layout.block_size,
            layout.own_slots[first_own + own_column],
        )
    )
    if is_causal:
        visible = own_column <= torch.arange(num_rows, device=device)[:, None]
    else:
        words = layout.ancestors[first : first + num_rows, own_column // WORD_BITS]
        visible = (words >> (own_column % WORD_BITS)) & 1 == 1
    visible = torch.cat((visible.new_ones(num_rows, context_len), visible), dim=1)
    if window is not None:
        column_positions = torch.cat((positions, layout.own_positions[first_own + own_column]))
        row_positions = layout.positions[first : first + num_rows]
        visible = visible & (row_positions[:, None] - column_positions < window)
    return slots, visible
