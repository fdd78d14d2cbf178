"""Scales of keys and values that a checkpoint was calibrated with, for caches of FP8 numbers.

compressed-tensors' tools and others write them beside the layers' weights, one number or one a
head: the divisors of keys and values before they are stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.errors import CheckpointError
from .checkpoint import KV_SCALES, WeightFiles


def read_kv_scales(
    files: WeightFiles, prefix: str, first: int, last: int, num_kv_heads: int
) -> Tensor | None:
    """float32 [layers, 2, kv_heads] of layers `first` to before `last`; None where none has any.

    Layers that have none get 1. Raises `CheckpointError` for scales that fit no head, or are not
    above 0.
    """
    names = [
        [f"{prefix}.layers.{layer}.self_attn.{kind}" for kind in KV_SCALES]
        for layer in range(first, last)
    ]
    there = [name for pair in names for name in pair if name in files.names]
    if not there:
        return None
    found = {name: tensor.float().reshape(-1) for name, tensor in files.read(there)}
    for name, scale in found.items():
        if len(scale) not in (1, num_kv_heads) or not (scale > 0).all():
            raise CheckpointError(
                f"{files.folder}: tensor {name} is no scale above 0, or {num_kv_heads} of them; "
                "fetch the checkpoint again"
            )
    one = torch.ones(1)
    rows = [[found.get(name, one).expand(num_kv_heads) for name in pair] for pair in names]
    return torch.stack([torch.stack(pair) for pair in rows])
