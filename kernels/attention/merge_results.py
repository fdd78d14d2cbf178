"""Merges attention over two disjoint sets of columns, by log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_results(first: Tensor, first_sums: Tensor, second: Tensor, second_sums: Tensor) -> Tensor:
    """Attention over both sets; results [rows, heads, head_dim], sums float32 [rows, heads].

    Sums are natural logs of sums of exponentials of logits; -inf, or +inf as FlashAttention says
    it, where a row sees nothing. Zeros where it sees nothing in either.
    """
    sums = torch.stack((first_sums, second_sums))
    sums = torch.where(sums == torch.inf, -torch.inf, sums)
    top = sums.amax(dim=0)
    weights = torch.exp(sums - torch.where(top == -torch.inf, 0.0, top))
    shares = weights / weights.sum(dim=0).clamp(min=1.0)
    merged = first.float() * shares[0, ..., None] + second.float() * shares[1, ..., None]
    return merged.to(first.dtype)
