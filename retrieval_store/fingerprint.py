"""Fingerprints that tie a segment to a tokenizer and to a target."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..core.errors import CheckpointError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
SAMPLE_BYTES = 2**20


def tokenizer_hash(folder: Path) -> str:
    """16 hexadecimal digits of the tokenizer of a checkpoint folder, from its own file.

    Raises `CheckpointError` if there is none.
    """
    for name in TOKENIZER_FILES:
        path = folder / name
        if path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    raise CheckpointError(f"{folder}: no {' or '.join(TOKENIZER_FILES)}; is it a model folder?")


def model_hash(folder: Path) -> str:
    """16 hexadecimal digits of a checkpoint: its configuration, and samples of its weights.

    Of each weight file the size and the first, middle and last MiB count, so that a checkpoint of
    hundreds of gigabytes takes milliseconds; a copy that was trained further differs there.
    Raises `CheckpointError` if there are no weights.
    """
    weights = sorted(folder.glob("*.safetensors"))
    config = folder / "config.json"
    if not weights or not config.is_file():
        raise CheckpointError(f"{folder}: no config.json with *.safetensors; is it a model folder?")
    digest = hashlib.sha256(config.read_bytes())
    for path in weights:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
