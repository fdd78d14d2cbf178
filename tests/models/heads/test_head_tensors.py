"""Drafters' tensors are read from every published format, and damaged ones are named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from draftline.core.errors import CheckpointError
from draftline.models.heads.head_tensors import HeadTensors
from safetensors.torch import save_file
from support.inputs import head_checkpoints as published

TENSORS = published.tensors(published.griffin())


def sharded(folder: Path, ending: str) -> None:
    halves = [dict(list(TENSORS.items())[part::2]) for part in (0, 1)]
    weight_map = {}
    for part, half in enumerate(halves):
        name = f"part-{part}.{ending}"
        weight_map |= dict.fromkeys(half, name)
        if ending == "bin":
            torch.save(half, folder / name)
        else:
            save_file(half, folder / name)
    index = "pytorch_model.bin" if ending == "bin" else "model.safetensors"
    (folder / f"{index}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def whole(folder: Path, ending: str) -> None:
    if ending == "safetensors":
        save_file(TENSORS, folder / "model.safetensors")
    else:
        is_zip = ending == "bin"
        torch.save(TENSORS, folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)


@pytest.mark.parametrize(
    ("write", "ending"),
    [
        (whole, "safetensors"), (whole, "bin"), (whole, "old bin"),
        (sharded, "safetensors"), (sharded, "bin"),
    ],
)  # fmt: skip
def test_all_formats_give_the_same(tmp_path: Path, write, ending: str) -> None:
    write(tmp_path, ending)
    read = HeadTensors(tmp_path)
    found = dict(read.read())
    assert read.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_shapes_are_told_without_the_numbers(tmp_path: Path) -> None:
    """Of a file that ends within them."""
    whole(tmp_path, "old bin")
    path = tmp_path / "pytorch_model.bin"
    numbers = sum(tensor.nbytes for tensor in TENSORS.values())
    path.write_bytes(path.read_bytes()[: -numbers // 2])
    read = HeadTensors(tmp_path)
    assert read.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        dict(read.read())


def test_prefixes_and_what_is_derived_are_left_out(tmp_path: Path) -> None:
    one = torch.ones(2)
    names = (
        "ea_layer.fc.weight", "module.midlayer.hidden_norm.weight", "model.norm.weight",
        "layers.0.self_attn.rotary_emb.inv_freq", "verifier_lm_head.weight",
    )  # fmt: skip
    save_file({name: one.clone() for name in names}, tmp_path / "model.safetensors")
    expected = {"fc.weight", "layers.0.hidden_norm.weight", "norm.weight"}
    assert HeadTensors(tmp_path).shapes.keys() == expected


def test_two_tensors_of_one_name_are_an_error(tmp_path: Path) -> None:
    one = torch.ones(2)
    save_file({"fc.weight": one, "model.fc.weight": one.clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"fc\.weight and model\.fc\.weight"):
        HeadTensors(tmp_path)


class Evil:
    """What runs a command when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_code_in_a_file_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"fc.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        HeadTensors(tmp_path)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("content", [b"", b"garbage" * 99, b"PK\x03\x04" + b"\0" * 99])
def test_damaged_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        HeadTensors(tmp_path)


def test_a_folder_without_tensors_says_what_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none of model\.safetensors"):
        HeadTensors(tmp_path)


@pytest.mark.parametrize("content", [[torch.ones(2)], {"epoch": 3, "fc.weight": torch.ones(2)}])
def test_only_tensors_by_name_are_taken(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"tensor"):
        HeadTensors(tmp_path)
