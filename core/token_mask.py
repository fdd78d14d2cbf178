"""Sets of tokens as bits, 32 to a word, lowest first: what grammars and masks of logits speak."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .arrays import Bool, UInt32

WORD = np.dtype("<u4")


def num_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)


def mask_of(token_ids: Iterable[int], vocab_size: int) -> UInt32:
    """uint32 [words] with the bits of these tokens; ids outside the vocabulary are left out."""
    ids = np.fromiter(token_ids, dtype=np.int64)
    allowed = np.zeros(num_words(vocab_size) * 32, dtype=np.bool_)
    allowed[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return np.packbits(allowed, bitorder="little").view(WORD).astype(np.uint32)


def full_mask(vocab_size: int) -> UInt32:
    """uint32 [words] with the bits of all tokens."""
    return mask_of(range(vocab_size), vocab_size)


def unpack(mask: UInt32, vocab_size: int) -> Bool:
    """bool [rows, vocabulary] of a mask uint32 [rows, words]."""
    data = mask.astype(WORD, copy=False).view(np.uint8)
    return np.unpackbits(data, axis=-1, count=vocab_size, bitorder="little").view(np.bool_)


def contains(mask: UInt32, token_ids: np.ndarray) -> Bool:
    """bool [n]: whether row i of `mask` [n, words] has token i."""
    words = mask[np.arange(len(token_ids)), token_ids >> 5]
    return ((words >> (token_ids & 31).astype(np.uint32)) & np.uint32(1)).astype(np.bool_)
