"""Attention of a head over a whole text."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def causal(_layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Each row sees itself and those before it."""
    queries, keys, values = (part.transpose(-3, -2) for part in (queries, keys, values))
    attended = functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], is_causal=True, enable_gqa=True
    )
    return attended[0].transpose(-3, -2)
