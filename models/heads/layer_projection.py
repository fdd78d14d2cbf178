"""Shares of single layers in what a head's first matrix makes of several, so that the stages of a
pipeline can add them up, each those of its own layers.

A matrix over states that stand side by side is a sum of matrices over one state each. So it is of
heads that norm each state by itself, or none; not where one norm goes over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from .formats.dflash_config import DFlashConfig
from .formats.feature_head_config import FeatureHeadConfig
from .load_head import HeadConfig, read_head_checkpoint
from .spec_former import SpecFormerConfig


class LayerProjection(nn.Module):
    """What the matrix makes of the states of one layer: [rows, hidden_size] of [rows, width]."""

    def __init__(self, weight: Tensor, norm: nn.RMSNorm | None) -> None:
        super().__init__()
        self.weight = nn.Buffer(weight)
        self.norm = norm

    def forward(self, states: Tensor) -> Tensor:
        """The layer's share of the head's `project`."""
        return functional.linear(states if self.norm is None else self.norm(states), self.weight)


def sum_size(folder: Path) -> int:
    """Columns of a head's `project` where that is a sum of shares of several layers; else 0.

    Raises `CheckpointError`.
    """
    config = read_head_checkpoint(folder).config
    return config.hidden_size if config is not None and _is_sum(config) else 0


def _is_sum(config: HeadConfig) -> bool:
    if config.num_features == 1:
        return False
    if isinstance(config, FeatureHeadConfig):
        return config.fusion == "pair" and config.has_fusion and config.norm_features != "all"
    return isinstance(config, DFlashConfig | SpecFormerConfig)


def load_layer_projections(
    folder: Path, layers: Sequence[int], wanted: Sequence[int], dtype: torch.dtype,
    device: torch.device,
) -> dict[int, LayerProjection]:  # fmt: skip
    """The projections of the layers `wanted`, of a head that reads `layers` side by side.

    Raises `CheckpointError`.
    """
    checkpoint = read_head_checkpoint(folder)
    config = checkpoint.config
    assert config is not None
    assert _is_sum(config)
    matrix, norm = _names(config)
    places = {layer: layers.index(layer) for layer in wanted}
    names = [matrix, *(norm.format(place) for place in places.values() if norm)]
    tensors = dict(checkpoint.tensors.read(names)) if places else {}
    found = {}
    for layer, place in places.items():
        width = tensors[matrix].shape[1] // len(layers)
        # A copy: the rest of the matrix is let go.
        own = tensors[matrix][:, place * width : (place + 1) * width].to(device, dtype, copy=True)
        scale = tensors[norm.format(place)].to(device, dtype) if norm else None
        found[layer] = LayerProjection(own.contiguous(), _norm(scale, config))
    return found


def _names(config: HeadConfig) -> tuple[str, str]:
    """Of the matrix, and of the norm of the state at a place; empty where there is none."""
    if isinstance(config, SpecFormerConfig):
        return "down_samp.weight", "norms.{}.weight"
    is_normed = isinstance(config, FeatureHeadConfig) and config.norm_features == "each"
    return "fc.weight", "fc_norm.{}.weight" if is_normed else ""


def _norm(scale: Tensor | None, config: HeadConfig) -> nn.RMSNorm | None:
    if scale is None:
        return None
    assert isinstance(config, FeatureHeadConfig | SpecFormerConfig)
    norm = nn.RMSNorm(len(scale), eps=config.rms_norm_eps, device=scale.device, dtype=scale.dtype)
    norm.weight = nn.Parameter(scale, requires_grad=False)
    return norm
