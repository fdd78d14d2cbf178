"""Sums of states of layers, as heads read them, of tiny models that are 32 wide."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from draftline.models.stage.options import FeatureSum
from torch import Tensor, nn

WIDTH = 32
# As heads have them: in an order of their own, one of them up to the last layer.
SUMS = (FeatureSum(Path(), (2, -1), 8), FeatureSum(Path(), (0, 3, 2), 12))
# Layers whose states are noted beside them.
NOTED = (0, 3)


def matrix(one: FeatureSum, layer: int) -> Tensor:
    """What a sum makes of a layer, [size, hidden_size]; of any layer another."""
    rng = torch.Generator().manual_seed(100 * one.size + layer + 1)
    return torch.randn(one.size, WIDTH, generator=rng) / 4


def load_matrices(
    one: FeatureSum, wanted: Sequence[int], dtype: torch.dtype, device: torch.device
) -> dict[int, nn.Module]:
    """As `LoadProjections` of `models/stage/feature_taps.py`."""
    found: dict[int, nn.Module] = {}
    for layer in wanted:
        own = nn.Linear(WIDTH, one.size, bias=False)
        own.weight = nn.Parameter(matrix(one, layer).to(device, dtype), requires_grad=False)
        found[layer] = own
    return found
