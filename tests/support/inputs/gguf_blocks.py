"""Random blocks of a GGUF file."""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType


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
