"""GGUF files with blocks of all kinds, and folders unpacked from them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from draftline.benchmarks.peers.gguf_file import write_checkpoint
from draftline.models.load.bundled import demo_path
from draftline.models.load.gguf_file import unpacked
from draftline.models.load.quantized_layouts import KEPT_FILE
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType


def unpacked_pair(
    source: Path, most: str, others: Mapping[str, GGMLQuantizationType]
) -> tuple[Path, Path]:
    """A checkpoint as a GGUF file, of which `others` by name are not of the kind of most; unpacked
    with its blocks, and without them. It gets the bundled tokenizer; all lie beside it."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_path("demo") / file, source / file)
    file = source.parent / "model.gguf"
    write_checkpoint(source, file, GGMLQuantizationType[most], others)
    folder = unpacked(file, source.parent / "cache")
    plain = shutil.copytree(folder, source.parent / "plain")
    (plain / KEPT_FILE).unlink()
    return folder, plain


def random_blocks(array: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """In place of a matrix's own, which gguf does not make of K kinds; with small scales."""
    if kind == GGMLQuantizationType.F32:
        return array
    rng = np.random.default_rng(array.size)
    size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (array.size // size, block_bytes), dtype=np.uint8)
    for first in (208,) if kind == GGMLQuantizationType.Q6_K else (0, 2):
        scale = 1e-2 if kind.name.startswith("Q5_") and kind.name[-1] in "01" else 1e-4
        numbers = rng.normal(size=(len(blocks), 1), scale=scale).astype(np.float16)
        if kind != GGMLQuantizationType.Q5_0 or not first:
            blocks[:, first : first + 2] = numbers.view(np.uint8)
    return blocks.reshape(*array.shape[:-1], -1)
