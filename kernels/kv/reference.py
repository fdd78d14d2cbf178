"""The operators on a KV cache in plain torch; layout: `models/attention/step_attention.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..row_scales import are_by_row

# The largest number of e4m3; a plain conversion would turn larger numbers into NaN.
LARGEST_FP8 = 448.0
# 448 is 1.75 * 2^8. A float32 whose mantissa is above 1.75 has a carry into its exponent when this
# is added to its bits.
FP8_EXPONENT, ABOVE_FP8_MANTISSA = 8, 0x1FFFFF


def write_kv(
    keys: Tensor, values: Tensor, pairs: Tensor, slots: Tensor, scales: Tensor | None = None
) -> None:
    """Store `keys` and `values` [rows, kv_heads, head_dim] at `slots` (int; -1: nowhere).

    There may be more slots than rows; the first count.

    `pairs` [slots, 2, kv_heads, head_dim] is one layer of the cache; of latents [slots, 1, ...],
    which takes keys alone. In a cache of FP8 numbers
    (e4m3) they are divided by `scales` and clamped to the range of the format: float32 [2,
    kv_heads], or [slots, 2, kv_heads] of a scale for every row, which is stored there.
    """
    slots = slots[: len(keys)]
    real = slots >= 0
    stored = torch.stack((keys, values)[: pairs.shape[1]], dim=1)[real]
    if scales is not None:
        if are_by_row(scales):
            own = row_scales(stored.float().abs().amax(dim=-1))
            scales[slots[real].long()] = own
        else:
            own = scales
        stored = stored.float() / own[..., None]
    if pairs.dtype == torch.float8_e4m3fn:
        stored = stored.float().clamp(-LARGEST_FP8, LARGEST_FP8)
    # Not all devices support indexing of FP8 tensors, so this indexes bytes.
    _raw(pairs)[slots[real].long()] = _raw(stored.to(pairs.dtype))


def row_scales(largest: Tensor) -> Tensor:
    """The scale of a row with this largest magnitude, float32: the least power of two, from 2^-126
    on, that brings it into the range of e4m3. A power of two makes the scaling exact."""
    exponents = ((largest.view(torch.int32) + ABOVE_FP8_MANTISSA) >> 23) - FP8_EXPONENT
    return (exponents.clamp(min=1) << 23).view(torch.float32)


def move_kv(data: Tensor, moves: Tensor) -> None:
    """Copy slots in all layers; `moves` int [m, 2] (from, to; -1: no move). All are read first.

    `data` is a whole cache, [layers, slots, 2, kv_heads, head_dim]. No slot is written twice.
    """
    moves = moves[moves[:, 0] >= 0].long()
    raw = _raw(data)
    raw[:, moves[:, 1]] = raw[:, moves[:, 0]]


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
