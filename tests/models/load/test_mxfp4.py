"""gpt-oss's experts in MXFP4, as the checkpoint stores them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from draftline.core.errors import CheckpointError
from draftline.models.layers.model_slice import load_slice, load_whole_model
from draftline.models.load.partition import LayerSpan
from safetensors.torch import load_file, save_file
from support.inputs.mxfp4_checkpoint import save_mxfp4_pair
from torch import Tensor

WHOLE = LayerSpan(0, 2, 2)
DOWN = "model.layers.1.mlp.experts.down_proj"


def test_packed_experts_are_what_they_stand_for(tmp_path: Path) -> None:
    pair = save_mxfp4_pair(tmp_path)
    found, expected = (load_whole_model(one).state_dict() for one in (pair.quantized, pair.plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def exponent_of_none(tensors: dict[str, Tensor]) -> None:
    tensors[f"{DOWN}_scales"][1, 2, 1] = 255


def other_blocks(tensors: dict[str, Tensor]) -> None:
    tensors[f"{DOWN}_blocks"] = tensors[f"{DOWN}_blocks"][:, :, :1].contiguous()


def fewer_experts(tensors: dict[str, Tensor]) -> None:
    for part in ("_blocks", "_scales"):
        tensors[DOWN + part] = tensors[DOWN + part][:3].contiguous()


def fewer_outputs(tensors: dict[str, Tensor]) -> None:
    for part in ("_blocks", "_scales"):
        tensors[DOWN + part] = tensors[DOWN + part][:, :8].contiguous()


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda tensors: tensors.pop(f"{DOWN}_scales"), f"tensor {DOWN}_scales missing"),
        (exponent_of_none, f"tensors of {DOWN} do not fit each other: a scale is not finite"),
        (other_blocks, f"tensors of {DOWN} do not fit each other"),
        (fewer_experts, f"{DOWN} is of 4 experts, and there are matrices of 3"),
        (fewer_outputs, rf"{DOWN} have shapes \(8, 64\), the config says \(32, 64\)"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    edit: Callable[[dict[str, Tensor]], object], reason: str, tmp_path: Path
) -> None:
    folder = save_mxfp4_pair(tmp_path).quantized
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=reason):
        load_slice(folder, WHOLE)
