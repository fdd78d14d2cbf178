"""Calibrated scales of keys and values: read for a cache of FP8, in the way of no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draftline.core.errors import CheckpointError
from draftline.models.layers.model_slice import load_slice
from draftline.models.load.partition import LayerSpan
from draftline.models.stage.plain_path import make_kv
from safetensors.torch import load_file, save_file
from support.tools.tiny_models import save_tiny_model

SPAN = LayerSpan(1, 3, 4)


def with_scales(folder: Path, **scales: torch.Tensor) -> Path:
    """A model of two key/value heads whose layer 2 has these."""
    save_tiny_model("llama", folder)
    tensors = load_file(folder / "model.safetensors")
    for name, scale in scales.items():
        tensors[f"model.layers.2.self_attn.{name}"] = scale
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_scales_of_the_checkpoint_are_those_of_the_cache(tmp_path: Path) -> None:
    """One for all heads, or one a head; layers without any have 1."""
    folder = with_scales(
        tmp_path, k_scale=torch.tensor(0.5), v_scale=torch.tensor([2.0, 3.0], dtype=torch.bfloat16)
    )
    part = load_slice(folder, SPAN)
    kv = make_kv(part, 2, 4, "fp8")
    assert kv.scales is not None
    assert kv.scales.tolist() == [[[1, 1], [1, 1]], [[0.5, 0.5], [2, 3]]]
    assert not kv.has_row_scales
    assert kv.num_bytes == kv.data.nbytes
    assert make_kv(part, 2, 4).scales is None


def test_without_scales_every_row_has_its_own(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    part = load_slice(tmp_path, SPAN)
    assert part.kv_scales is None
    kv, plain = make_kv(part, 2, 4, "fp8"), make_kv(part, 2, 4)
    assert kv.has_row_scales
    assert not plain.has_row_scales
    assert kv.scales is not None
    assert kv.scales.shape == kv.data.shape[:-1]
    assert kv.num_bytes == kv.data.nbytes + kv.scales.nbytes
    assert plain.num_bytes == plain.data.nbytes


@pytest.mark.parametrize("scale", [torch.tensor([1.0, 2.0, 3.0]), torch.tensor(0.0)])
def test_what_is_no_scale_is_refused(scale: torch.Tensor, tmp_path: Path) -> None:
    folder = with_scales(tmp_path, k_scale=scale)
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.k_scale is no scale above 0"):
        load_slice(folder, SPAN)
