"""Blocks of GGUF files are kept as codes and scales with the very values that gguf gives them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from draftline.models.load.gguf_blocks import KINDS, quantized
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

# Where a block has float16 numbers.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
ROWS, BLOCKS = 5, 3


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_gguf(kind: str) -> None:
    rng, own = np.random.default_rng(0), GGMLQuantizationType[kind]
    _, block_bytes = GGML_QUANT_SIZES[own]
    blocks = rng.integers(0, 256, (ROWS * BLOCKS, block_bytes), dtype=np.uint8)
    for first in HALVES[kind]:
        numbers = rng.normal(size=(len(blocks), 1)).astype(np.float16)
        blocks[:, first : first + 2] = numbers.view(np.uint8)
    data = blocks.reshape(ROWS, -1)
    found = quantized(data, kind)
    assert found is not None
    expected = torch.from_numpy(dequantize(data, own).copy())
    assert torch.equal(found.dequantized(torch.float32), expected)


def test_other_kinds_are_not_kept() -> None:
    assert quantized(np.zeros((2, 110), dtype=np.uint8), "Q3_K") is None
