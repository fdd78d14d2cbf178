"""Attention of all rows of a step over a paged KV cache, in Triton.

Reads each key and value once for all query lines of a tile: the rows of a request times the heads
that share a key. Importing this file needs Triton; `kernels/dispatch.py` does so where Triton is
chosen.
"""

# Triton accepts plain numbers for constexpr parameters, whatever their annotation.
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..row_scales import are_by_row
from ..shared_kernels import dot_type, triton_type
from .spec import LayerSpec
from .step_layout import StepLayout
from .tile_plan import COLUMN_STEP
from .tree_attention_kernels import attend_tiles

# Set explicitly: Triton warns that its default will change.
FUSED = {"enable_fp_fusion": True}
# The minimum of tl.dot.
LEAST_DIM = LEAST_COLUMNS = 16
# Bytes of the keys in a tile of columns. Keys, values, the prefetched next tile and the queries fit
# the 99 KiB of shared memory of consumer GPUs (Ada). With the results of 64 lines, they fit a
# thread's registers.
KEY_BYTES, KEY_BYTES_OF_MANY_LINES = 16384, 8192
MANY_LINES = 64
# Lines of partial results that a program reads at once, beside its results.
GROUP_LINES, GROUP_LINES_OF_MANY = 128, 64
# Of results of more numbers, such as latents.
MOST_DIMS, GROUP_LINES_OF_LONG = 256, 32
# Double buffering of keys and values: one tile is copied while the other is multiplied. Of longer
# rows shared memory holds one.
NUM_STAGES, NUM_STAGES_OF_LONG = 3, 2
MOST_ROW_BYTES = 1024


def paged_attention(
    query: Tensor, pairs: Tensor, layout: StepLayout, spec: LayerSpec,
    out: Tensor, *, log_sums: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the attention of `query` to `out`, and log-sums to `log_sums`.

    Shapes, dtypes and semantics are those of `paged_attention` in `kernels/attention/reference.py`.
    The last dimension of queries, results and pairs must be contiguous.
    """
    shape, partials = layout.shape, layout.partials
    assert query.stride(2) == out.stride(2) == pairs.stride(3) == 1
    sums = out if log_sums is None else log_sums
    dims, rotated_dims = (
        max(triton.next_power_of_2(size), LEAST_DIM) for size in (shape.head_dim, shape.rotated_dim)
    )
    lines = max(layout.tile_lines, LEAST_DIM)
    by_row = are_by_row(spec.scales)
    attend_tiles[layout.launch_items, shape.num_kv_heads](
        query, pairs, out, sums, out if spec.scales is None else spec.scales,
        partials.out, partials.sums, partials.arrived, layout.item_count,
        layout.items, layout.requests, layout.positions, layout.ancestors,
        layout.own_slots, layout.own_positions, layout.first_blocks, layout.blocks,
        layout.capacity.num_words, spec.scaling, spec.window or 0, spec.softcap or 0.0,
        query.stride(0), query.stride(1), pairs.stride(0), pairs.stride(1), pairs.stride(2),
        out.stride(0), out.stride(1), sums.stride(0),
        BLOCK_SIZE=layout.block_size, SHARE=shape.share, HEAD_DIM=shape.head_dim, DIMS=dims,
        ROTATED_DIM=shape.rotated_dim, ROTATED_DIMS=rotated_dims,
        LINES=lines, HAS_SUMS=log_sums is not None, KEEP=triton_type(out.dtype),
        HAS_WINDOW=spec.window is not None, HAS_SOFTCAP=spec.softcap is not None,
        HAS_SCALES=spec.scales is not None and not by_row, BY_ROW=by_row,
        **tile_options(dims, query.dtype, lines), **FUSED,
    )  # fmt: skip


def tile_options(dims: int, dtype: torch.dtype, lines: int) -> dict[str, object]:
    """Constants and launch options for tiles of `lines` lines and heads of `dims` numbers.

    Few columns where keys are long or lines many.
    """
    row_bytes = dims * dtype.itemsize
    are_many = lines >= MANY_LINES
    key_bytes = KEY_BYTES_OF_MANY_LINES if are_many else KEY_BYTES
    group_lines = GROUP_LINES_OF_MANY if are_many else GROUP_LINES
    if dims > MOST_DIMS:
        group_lines = GROUP_LINES_OF_LONG
    return {
        "COLUMNS": min(max(key_bytes // row_bytes, LEAST_COLUMNS), COLUMN_STEP),
        "GROUP": max(group_lines // lines, 1),
        "DOT": dot_type(dtype),
        "num_warps": 8 if row_bytes > 256 or dtype.itemsize == 4 else 4,
        "num_stages": NUM_STAGES_OF_LONG if row_bytes > MOST_ROW_BYTES else NUM_STAGES,
    }
