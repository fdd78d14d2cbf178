"""A model folder in Hugging Face format: where it is, its config, its tensors."""

from __future__ import annotations

import json
import re
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
from .gguf_file import unpacked
from .public_models import PUBLIC_MODELS, public_folder

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Recomputed from the config; checkpoints of old exporters still carry it.
DERIVED = "rotary_emb.inv_freq"
# Of keys and values, for a cache of FP8 numbers: nothing else reads them.
KV_SCALES = ("k_scale", "v_scale")
# Settings of a composite model's config besides those of its parts.
OF_ALL_PARTS = (
    "quantization_config",
    "compression_config",
    "dtype",
    "eos_token_id",
    "bos_token_id",
)
# How the names of a decoder's embedding and head end, whatever they are a part of.
EMBEDDING, HEAD = "embed_tokens.weight", re.compile(r"(?:^|\.)(lm_head)\.[^.]+$")
# Most names that an error lists.
MAX_LISTED = 8
PAGE_BYTES = 4096


def resolve_model_path(model: str | Path) -> Path:
    """The folder of a model: `model` itself, what a GGUF file is unpacked to, a bundled or public
    one by name, or the snapshot of a hub id.

    Raises `CheckpointError` if it is none of these, or cannot be fetched.
    """
    if str(model) in PUBLIC_MODELS:
        return public_folder(str(model))
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return unpacked(path)
    return _folder(model, BUNDLED_NAMES, ("*.safetensors", "*.json", "*.jinja", "tokenizer.model"))


def resolve_head_path(model: str | Path) -> Path:
    """The same for a head, whose tensors are often in PyTorch's own files."""
    # That a model itself holds.
    if str(model) in (*PUBLIC_MODELS, *BUNDLED_NAMES) or str(model).endswith(".gguf"):
        return resolve_model_path(model)
    return _folder(model, BUNDLED_HEADS, ("*.safetensors", "*.json", "*.bin", "*.pt"))


def _folder(model: str | Path, bundled: Sequence[str], patterns: Sequence[str]) -> Path:
    if str(model) in bundled:
        return demo_path(str(model))
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if isinstance(model, Path) or str(model).count("/") != 1 or str(model).startswith((".", "/")):
        raise CheckpointError(
            f"model folder {model} does not exist; give a folder, a hub id or a GGUF file"
        )
    try:
        return Path(snapshot_download(model, allow_patterns=list(patterns)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"model {model} is not a local folder and could not be fetched from the model hub "
            f"({type(error).__name__}); give the path of a folder that holds config.json"
        ) from error


def read_config(model: str | Path) -> PretrainedConfig:
    """The config of the model that generates text: of a composite model, that of its text part.

    Raises `CheckpointError` if it is missing or unreadable.
    """
    folder = resolve_model_path(model)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; give a Hugging Face model folder")
    try:
        whole = AutoConfig.from_pretrained(folder, local_files_only=True)
        part = whole.get_text_config(decoder=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be read: {error}") from error
    if part.model_type == whole.model_type:
        return whole
    if getattr(whole, "is_encoder_decoder", False):
        raise CheckpointError(
            f"{folder}: model_type {whole.model_type!r} has an encoder; give a decoder-only model"
        )
    # The top level may hold it for all parts; a flag in either ties a head that is not stored.
    is_tied = any(getattr(one, "tie_word_embeddings", False) for one in (part, whole))
    part.tie_word_embeddings = is_tied
    for name in OF_ALL_PARTS:
        if getattr(part, name, None) is None and getattr(whole, name, None) is not None:
            setattr(part, name, getattr(whole, name))
    return part


def answers_chats(model: str | Path) -> bool:
    """Whether a model is asked in chats: its files have a chat template. The bundled ones have one,
    too, and only continue code.

    The tokenizer is not loaded. False where there are no files: on a cluster, others may have them.
    """
    if str(model) in BUNDLED_NAMES:
        return False
    try:
        folder = resolve_model_path(model)
    except CheckpointError:
        return False
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(read_json(config).get("chat_template"))


def composite_type(folder: Path, config: PretrainedConfig) -> str | None:
    """The model_type of the composite model whose text part `config` (of `read_config`) is; None:
    the folder holds no composite model."""
    stored = read_json(folder / "config.json").get("model_type")
    return stored if isinstance(stored, str) and stored != config.model_type else None


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
        """Whether a tensor without a place in the model can be ignored."""
        ...

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors, one after the other, in any order. Raises `CheckpointError`."""
        ...


def one_ahead(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same, prefetching one tensor while the previous is processed: two on the host."""
    with ThreadPoolExecutor(1, thread_name_prefix="draftline-weights") as reader:
        following = reader.submit(_next_read, tensors)
        while (found := following.result()) is not None:
            following = reader.submit(_next_read, tensors)
            yield found


def _next_read(tensors: Iterator[tuple[str, Tensor]]) -> tuple[str, Tensor] | None:
    found = next(tensors, None)
    if found is not None and found[1].device.type == "cpu":
        # Files are memory-mapped: touching one byte a page reads it.
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
        """`single`: name of the one file, which takes precedence over an index."""
        self.folder = folder
        if (folder / single).is_file():
            with _opened(folder / single) as tensors:
                file_of: dict[str, str] = dict.fromkeys(tensors.keys(), single)
        elif (folder / INDEX_FILE).is_file() and single == SINGLE_FILE:
            weight_map = read_json(folder / INDEX_FILE).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map; fetch it again")
            file_of = weight_map
        else:
            raise CheckpointError(
                f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; "
                "convert the weights to safetensors"
            )
        self._files = tuple(sorted(set(file_of.values())))
        # That was read last: opening one with the tensors of thousands of experts takes long.
        self._open: tuple[str, safe_open] | None = None
        # By the name in a plain checkpoint: the file, and the name there.
        self._stored = {name: (file, name) for name, file in file_of.items()}

    def take_text_part(self) -> None:
        """Keep only the tensors of a composite model's text part, under their names in a plain
        model.

        `language_model.model.layers...` and `model.language_model.layers...` become
        `model.layers...`. Raises `CheckpointError` if the names are ambiguous.
        """
        owners = {name.removesuffix(EMBEDDING) for name in self.names if name.endswith(EMBEDDING)}
        heads = {name[: match.start(1)] for name in self.names if (match := HEAD.search(name))}
        if len(owners) != 1 or len(heads) > 1:
            raise CheckpointError(
                f"{self.folder}: the names of its tensors do not say which are the text part's "
                f"({len(owners)} embeddings of tokens, {len(heads)} heads); "
                "save the text part as a model of its own"
            )
        moved = [(owner, "model.") for owner in owners]
        moved += [(f"{owner}lm_head.", "lm_head.") for owner in heads]
        self._stored = {
            plain + name.removeprefix(prefix): stored
            for name, stored in self._stored.items()
            for prefix, plain in moved
            if name.startswith(prefix)
        }

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors of the checkpoint."""
        return frozenset(self._stored)

    @property
    def has_head(self) -> bool:
        """Whether an output head is stored, quantised or not."""
        return any(HEAD.search(name) for name in self.names)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files. Raises `CheckpointError` where one is missing."""
        paths = [self.folder / file for file in self._files]
        try:
            return sum(path.stat().st_size for path in paths)
        except OSError as error:
            raise CheckpointError(f"{error.filename} is missing; fetch it again") from error

    def is_incidental(self, name: str) -> bool:
        """Whether a tensor without a place in the model can be ignored."""
        owner, _, last = name.rpartition(".")
        is_scale = last in KV_SCALES and owner.endswith(".self_attn")
        return is_scale or name.endswith(DERIVED)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, by name, without reading them."""
        return {name: shape for name, (_, shape) in self.headers().items()}

    def headers(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type, as safetensors names it, and shape of all tensors, without reading them."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for file in self._files:
            own = [
                (name, stored) for name, (holder, stored) in self._stored.items() if holder == file
            ]
            with _opened(self.folder / file) as tensors:
                for name, stored in own:
                    header = tensors.get_slice(stored)
                    found[name] = header.get_dtype(), tuple(header.get_shape())
        return found

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors, file by file, as stored. All names must be in `names`."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._stored[name][0], []).append(name)
        for file, wanted in by_file.items():
            if self._open is None or self._open[0] != file:
                self._open = file, _opened(self.folder / file)
            tensors = self._open[1]
            for name in wanted:
                yield name, _read_tensor(tensors, self._stored[name][1], self.folder / file)


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
