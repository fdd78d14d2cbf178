"""Attention as a head has it that drafts one row after the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class DraftedKeys:
    """Each row attends those that were computed before it, and itself."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []

    def __call__(self, _layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Of one row: [1, heads, head_dim]."""
        self.kept.append((keys, values))
        keys, values = (torch.cat(parts) for parts in zip(*self.kept, strict=True))
        parts = (part.transpose(0, 1) for part in (queries, keys, values))
        return functional.scaled_dot_product_attention(*parts, enable_gqa=True).transpose(0, 1)
