"""Fingerprints of a tokenizer and of a model, for data that belongs to exactly one of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ..load.checkpoint import read_json, resolve_model_path
from .tokenizer import load_tokenizer

# What savers write into a config that does not change what the model computes.
INCIDENTAL = frozenset(
    {"transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache"}
)
SAMPLES = 64
SAMPLE_BYTES = 4096


def tokenizer_hash(model: str | Path) -> str:
    """32 hex digits: equal for two folders if every token id means the same token in both.

    Raises `CheckpointError`.
    """
    vocabulary = load_tokenizer(model).get_vocab()
    tokens = sorted((token_id, token) for token, token_id in vocabulary.items())
    return _digest([json.dumps(tokens).encode()])


def model_hash(model: str | Path) -> str:
    """32 hex digits of a model's config and of samples of its weights, read in milliseconds.

    Raises `CheckpointError`.
    """
    folder = resolve_model_path(model)
    config = read_json(folder / "config.json")
    kept = {key: value for key, value in config.items() if key not in INCIDENTAL}
    parts = [json.dumps(kept, sort_keys=True).encode()]
    for file in sorted(folder.glob("*.safetensors")):
        parts.extend(_samples(file))
    return _digest(parts)


def _samples(file: Path) -> list[bytes]:
    """The file's size and evenly spread pieces of it, its header among them."""
    size = file.stat().st_size
    pieces = [str(size).encode()]
    with file.open("rb") as content:
        for index in range(SAMPLES):
            content.seek(index * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
            pieces.append(content.read(SAMPLE_BYTES))
    return pieces


def _digest(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:32]
