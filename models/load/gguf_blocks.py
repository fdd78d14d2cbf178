"""The blocks of GGUF files as codes with scales, from which the same float32 values come.

A value is `(code - zero) * scale` or `code * scale + minimum`, as llama.cpp's and gguf's own
functions compute it (`gguf.quants`), of which each operation is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .quantized_layouts import QuantizedWeight, groups_in_order

# uint8 [rows, blocks, bytes of a block].
Blocks = NDArray[np.uint8]


def quantized(data: NDArray[np.uint8], kind: str) -> QuantizedWeight | None:
    """A tensor of a GGUF file, uint8 [outputs, bytes]; None: of a kind that is not kept."""
    if kind not in KINDS:
        return None
    block_bytes, parts_of = KINDS[kind]
    blocks = np.ascontiguousarray(data).reshape(len(data), -1, block_bytes)
    codes, scales, zeros, minima = parts_of(blocks)
    num_inputs, num_groups = codes.shape[1], scales.shape[1]
    like = torch.from_numpy(codes)
    return QuantizedWeight(
        codes=like,
        scales=torch.from_numpy(scales),
        zeros=_tensor(zeros),
        group_of=groups_in_order(num_inputs, num_inputs // num_groups, like),
        minima=_tensor(minima),
    )


# Codes [rows, inputs]; scales, zeros and minima float32 [rows, groups].
_Parts = tuple[NDArray, NDArray, NDArray | None, NDArray | None]


def _q4_0(blocks: Blocks) -> _Parts:
    scales = _halves(blocks[..., :2])
    return _flat(_nibbles(blocks[..., 2:])), scales, np.full_like(scales, 8), None


def _q4_1(blocks: Blocks) -> _Parts:
    codes = _flat(_nibbles(blocks[..., 4:]))
    return codes, _halves(blocks[..., :2]), None, _halves(blocks[..., 2:4])


def _q5_0(blocks: Blocks) -> _Parts:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6]) << 4
    return _flat(codes).view(np.int8) - np.int8(16), _halves(blocks[..., :2]), None, None


def _q5_1(blocks: Blocks) -> _Parts:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8]) << 4
    return _flat(codes).view(np.int8), _halves(blocks[..., :2]), None, _halves(blocks[..., 2:4])


def _fifth_bits(packed: Blocks) -> Blocks:
    """The bit of each of 32 codes, [rows, blocks, 32]."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _q8_0(blocks: Blocks) -> _Parts:
    return _flat(blocks[..., 2:]).view(np.int8), _halves(blocks[..., :2]), None, None


def _q4_k(blocks: Blocks) -> _Parts:
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    scales, minima = _of_eight_groups(blocks)
    return _flat(codes), scales, None, minima


def _q5_k(blocks: Blocks) -> _Parts:
    low = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32))
    # Bit i of 32 bytes is of group i.
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = low.reshape(high.shape) | high << 4
    scales, minima = _of_eight_groups(blocks)
    return _flat(codes).view(np.int8), scales, None, minima


def _of_eight_groups(blocks: Blocks) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and minima, from products of two numbers and codes of 6 bits."""
    whole, least = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    low, high, both = (blocks[..., first : first + 4] for first in (4, 8, 12))
    scales = np.concatenate([low & 63, both & 15 | low >> 2 & 48], axis=-1)
    minima = np.concatenate([high & 63, both >> 4 | high >> 2 & 48], axis=-1)
    return _flat(whole[..., None] * scales), -_flat(least[..., None] * minima)


def _q6_k(blocks: Blocks) -> _Parts:
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> shifts & 3
    codes = low.reshape(high.shape) | high << 4
    scales = _halves(blocks[..., 208:])[..., None] * blocks[..., 192:208].view(np.int8)
    return _flat(codes).view(np.int8) - np.int8(32), _flat(scales), None, None


# By gguf's name: bytes of a block, and what its blocks mean.
KINDS: dict[str, tuple[int, Callable[[Blocks], _Parts]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}


def _halves(two_bytes: Blocks) -> NDArray[np.float32]:
    """float32 [rows, blocks] of float16."""
    return np.ascontiguousarray(two_bytes).view(np.float16).astype(np.float32)[..., 0]


def _nibbles(packed: Blocks) -> Blocks:
    """Low halves of the last axis' bytes, and then the high ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


def _flat(parts: NDArray) -> NDArray:
    """[rows, all others]."""
    return np.ascontiguousarray(parts.reshape(len(parts), -1))


def _tensor(array: NDArray | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)
