"""The tensors of a drafter's checkpoint in any published format, under uniform names."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import CheckpointError
from ..load.checkpoint import INDEX_FILE, SINGLE_FILE, TensorFiles, read_json

TORCH_FILE = "pytorch_model.bin"
# Medusa's heads have their own file names.
MEDUSA_FILE, MEDUSA_TORCH_FILE = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
TORCH_INDEX = "pytorch_model.bin.index.json"
# Name prefixes of wrappers; `midlayer` is a layer list of one.
PREFIX = re.compile(r"^(?:model\.|draft_model\.|ea_layer\.|module\.|logit_head\.)+")
# The errors of torch and pickle for a file that is missing, damaged, or not only tensors.
UNREADABLE = (OSError, RuntimeError, ValueError, LookupError, EOFError, pickle.UnpicklingError)
# Recomputed from the config, or the target's own.
SKIPPED = re.compile(r"(?:^|\.)rotary_emb\.|^verifier_")


class HeadTensors:
    """The tensors of a checkpoint folder: safetensors or PyTorch files, whole or in shards.

    The constructor only reads shapes, so that detecting a head's kind is fast; `read` reads the
    data. PyTorch files are read with `weights_only`, so that they cannot run code.

    shapes  of all, by name, without wrappers' prefixes and derived tensors

    Raises `CheckpointError` naming the file if one is missing or corrupt, or if two tensors have
    one name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: TensorFiles | None = None
        # The folder may also contain the target model.
        single = MEDUSA_FILE if (folder / MEDUSA_FILE).is_file() else SINGLE_FILE
        has_own_file = single == MEDUSA_FILE or (folder / MEDUSA_TORCH_FILE).is_file()
        if single == MEDUSA_FILE or (
            not has_own_file and ((folder / single).is_file() or (folder / INDEX_FILE).is_file())
        ):
            self._files = TensorFiles(folder, single)
            stored = self._files.shapes()
        else:
            read = _read_torch(folder, _torch_shapes)
            stored = {name: tuple(tensor.shape) for name, tensor in read.items()}
        self._stored = _plain_names(folder, stored)
        self.shapes = {name: stored[source] for name, source in self._stored.items()}

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename tensors by a map from old to new names; the others are dropped."""
        stored = self._stored
        self._stored = {}
        for name, renamed in names.items():
            if renamed in self._stored:
                raise CheckpointError(f"{self.folder}: two tensors are {renamed}; one is {name}")
            self._stored[renamed] = stored[name]
        self.shapes = {renamed: self.shapes[name] for name, renamed in names.items()}

    def read(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """All tensors, or those of some plain names, as stored."""
        wanted = self._stored if names is None else {name: self._stored[name] for name in names}
        if self._files is None:
            read = _read_torch(self.folder, _torch_tensors)
            yield from ((name, read[stored]) for name, stored in wanted.items())
            return
        plain = {stored: name for name, stored in wanted.items()}
        for stored, tensor in self._files.read(plain):
            yield plain[stored], tensor


def _plain_names(folder: Path, stored: Iterable[str]) -> dict[str, str]:
    """The names that tensors are stored under, by their plain names."""
    found: dict[str, str] = {}
    for source in sorted(stored):
        name = plain_name(source)
        if SKIPPED.search(name):
            continue
        if name in found:
            raise CheckpointError(f"{folder}: tensors {found[name]} and {source} are both {name}")
        found[name] = source
    return found


def plain_name(name: str) -> str:
    """A tensor's name without the prefixes of wrappers; EAGLE-3's one layer is `layers.0`."""
    name = PREFIX.sub("", name)
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _read_torch(folder: Path, read: Callable[[Path], object]) -> dict[str, Tensor]:
    files = [MEDUSA_TORCH_FILE] if (folder / MEDUSA_TORCH_FILE).is_file() else _torch_files(folder)
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(_checked_torch_file(folder / file, read))
    return tensors


def _torch_files(folder: Path) -> list[str]:
    if (folder / TORCH_INDEX).is_file():
        weight_map = read_json(folder / TORCH_INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{folder / TORCH_INDEX} has no weight_map; fetch it again")
        return sorted(set(weight_map.values()))
    if (folder / TORCH_FILE).is_file():
        return [TORCH_FILE]
    raise CheckpointError(
        f"{folder} has none of {SINGLE_FILE}, {INDEX_FILE}, {TORCH_FILE}, {TORCH_INDEX}; give "
        "the folder of a drafter's checkpoint"
    )


def _torch_shapes(path: Path) -> object:
    """The tensors of a file, on the meta device."""
    with torch.serialization.skip_data():
        return torch.load(path, map_location="meta", weights_only=True)


def _torch_tensors(path: Path) -> object:
    """The tensors of a file; files of PyTorch 1.6 and later are memory-mapped."""
    is_zip = zipfile.is_zipfile(path)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def _checked_torch_file(path: Path, read: Callable[[Path], object]) -> dict[str, Tensor]:
    try:
        content = read(path)
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is missing or corrupt ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold tensors by name")
    other = [name for name, value in content.items() if not isinstance(value, Tensor)]
    if other:
        raise CheckpointError(f"{path} holds {other[0]}, which is no tensor; save a state dict")
    return content
