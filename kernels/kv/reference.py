"""What the operators on a KV cache do, in plain torch; layout: `step_attention.py`."""

from __future__ import annotations

import torch
from torch import Tensor

# The largest number of e4m3; conversion alone would make NaN of what is larger.
LARGEST_FP8 = 448.0


def write_kv(
    keys: Tensor, values: Tensor, pairs: Tensor, slots: Tensor, scales: Tensor | None = None
) -> None:
    """Store `keys` and `values` [rows, kv_heads, head_dim] at `slots` (int; -1: nowhere).

    There may be more slots than rows; the first count.

    `pairs` [slots, 2, kv_heads, head_dim] is one layer of the cache. In a cache of FP8 numbers
    (e4m3) they are divided by `scales`, float32 [2, kv_heads], and cut to what can be stored.
    """
    slots = slots[: len(keys)]
    real = slots >= 0
    stored = torch.stack((keys, values), dim=1)[real]
    if scales is not None:
        stored = stored.float() / scales[:, :, None]
    if pairs.dtype == torch.float8_e4m3fn:
        stored = stored.float().clamp(-LARGEST_FP8, LARGEST_FP8)
    # Indexing is not known to FP8 on all devices; bytes are.
    _raw(pairs)[slots[real].long()] = _raw(stored.to(pairs.dtype))


def move_kv(data: Tensor, moves: Tensor) -> None:
    """Copy slots in all layers; `moves` int [m, 2] (from, to; -1: no move). All are read first.

    `data` is a whole cache, [layers, slots, 2, kv_heads, head_dim]. No slot is written twice.
    """
    moves = moves[moves[:, 0] >= 0].long()
    raw = _raw(data)
    raw[:, moves[:, 1]] = raw[:, moves[:, 0]]


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
