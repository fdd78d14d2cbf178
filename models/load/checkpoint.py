"""A model folder in Hugging Face format: where it is, its config, its tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from ...core.errors import CheckpointError
from .bundled import BUNDLED_HEADS, BUNDLED_NAMES, demo_path

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Recomputed from the config; checkpoints of old exporters still carry it.
DERIVED = "rotary_emb.inv_freq"
# Of keys and values, for a cache of FP8 numbers: nothing else reads them.
KV_SCALES = ("k_scale", "v_scale")
# Most names that an error lists.
MAX_LISTED = 8
PAGE_BYTES = 4096


def resolve_model_path(model: str | Path) -> Path:
    """The folder of a model: `model` itself, a bundled one by name, or the snapshot of a hub id.

    Raises `CheckpointError` if it is neither a folder nor a hub id that can be fetched.
    """
    return _folder(model, BUNDLED_NAMES, ("*.safetensors", "*.json", "*.jinja", "tokenizer.model"))


def resolve_head_path(model: str | Path) -> Path:
    """The same for a head, whose tensors are often in PyTorch's own files."""
    return _folder(model, BUNDLED_HEADS, ("*.safetensors", "*.json", "*.bin", "*.pt"))


def _folder(model: str | Path, bundled: Sequence[str], patterns: Sequence[str]) -> Path:
    if str(model) in bundled:
        return demo_path(str(model))
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if isinstance(model, Path) or str(model).count("/") != 1 or str(model).startswith((".", "/")):
        raise CheckpointError(f"model folder {model} does not exist; give a folder or a hub id")
    try:
        return Path(snapshot_download(model, allow_patterns=list(patterns)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"model {model} is not a local folder and could not be fetched from the model hub "
            f"({type(error).__name__}); give the path of a folder that holds config.json"
        ) from error


def read_config(model: str | Path) -> PretrainedConfig:
    """The model's config. Raises `CheckpointError` if it is missing or unreadable."""
    folder = resolve_model_path(model)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; give a Hugging Face model folder")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be read: {error}") from error


def read_json(path: Path) -> dict:
    """A JSON object. Raises `CheckpointError` naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return content


class WeightFiles(Protocol):
    """The tensors of a model folder by their names in a plain checkpoint."""

    @property
    def folder(self) -> Path:
        """Of the checkpoint."""
        ...

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        ...

    def is_incidental(self, name: str) -> bool:
        """Whether a tensor that the model has no place for changes nothing."""
        ...

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors, one after the other, in any order. Raises `CheckpointError`."""
        ...


def one_ahead(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same, of which the next is read from its file while one is worked on: two on the host."""
    with ThreadPoolExecutor(1, thread_name_prefix="draftline-weights") as reader:
        following = reader.submit(_next_read, tensors)
        while (found := following.result()) is not None:
            following = reader.submit(_next_read, tensors)
            yield found


def _next_read(tensors: Iterator[tuple[str, Tensor]]) -> tuple[str, Tensor] | None:
    found = next(tensors, None)
    if found is not None and found[1].device.type == "cpu":
        # Files are mapped: a byte of each page has to be asked for to read it.
        found[1].reshape(-1).view(torch.uint8)[::PAGE_BYTES].sum()
    return found


def listed(names: Sequence[str]) -> str:
    """Names of tensors for an error: `tensor a`, or `tensors a, b and 3 more`."""
    if len(names) == 1:
        return f"tensor {names[0]}"
    more = len(names) - MAX_LISTED
    return f"tensors {', '.join(names[:MAX_LISTED])}" + (f" and {more} more" if more > 0 else "")


class TensorFiles:
    """The safetensors of a model folder: one file, or shards with an index.

    Raises `CheckpointError` naming the file if one is missing or corrupt.
    """

    def __init__(self, folder: Path, single: str = SINGLE_FILE) -> None:
        """`single`: name of the one file, which comes before an index where it is another."""
        self._folder = folder
        if (folder / INDEX_FILE).is_file() and single == SINGLE_FILE:
            weight_map = read_json(folder / INDEX_FILE).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map; fetch it again")
            self._file_of: dict[str, str] = weight_map
        elif (folder / single).is_file():
            with _opened(folder / single) as tensors:
                self._file_of = dict.fromkeys(tensors.keys(), single)
        else:
            raise CheckpointError(
                f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; "
                "convert the weights to safetensors"
            )

    @property
    def folder(self) -> Path:
        """Of the checkpoint."""
        return self._folder

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors of the checkpoint."""
        return frozenset(self._file_of)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files. Raises `CheckpointError` where one is missing."""
        paths = [self._folder / file for file in sorted(set(self._file_of.values()))]
        try:
            return sum(path.stat().st_size for path in paths)
        except OSError as error:
            raise CheckpointError(f"{error.filename} is missing; fetch it again") from error

    def is_incidental(self, name: str) -> bool:
        """Whether a tensor that the model has no place for changes nothing."""
        owner, _, last = name.rpartition(".")
        is_scale = last in KV_SCALES and owner.endswith(".self_attn")
        return is_scale or name.endswith(DERIVED)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, by name, without reading them."""
        found: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(self._file_of.values())):
            with _opened(self._folder / file) as tensors:
                names = list(tensors.keys())
                found.update((name, tuple(tensors.get_slice(name).get_shape())) for name in names)
        return found

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors, file by file, as stored. All names must be in `names`."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._file_of[name], []).append(name)
        for file, wanted in by_file.items():
            with _opened(self._folder / file) as tensors:
                for name in wanted:
                    yield name, _read_tensor(tensors, name, self._folder / file)


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is missing or corrupt ({error}); fetch it again") from error


def _read_tensor(tensors: safe_open, name: str, path: Path) -> Tensor:
    try:
        return tensors.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(
            f"tensor {name} cannot be read from {path} ({error}); fetch the file again"
        ) from error
