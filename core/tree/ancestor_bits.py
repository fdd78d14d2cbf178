"""Which columns each row of a tree sees, a bit each: an eighth of the bytes of a bool mask."""

from __future__ import annotations

import numpy as np

from ..arrays import Bool, UInt64

WORD_BITS = 64


def pack(mask: Bool) -> UInt64:
    """uint64 [rows, words] of a mask [rows, columns]: column c is bit c % 64 of word c // 64."""
    rows, columns = mask.shape
    padded = np.zeros((rows, -(-columns // WORD_BITS) * WORD_BITS), dtype=np.bool_)
    padded[:, :columns] = mask
    return np.packbits(padded, axis=1, bitorder="little").view("<u8").astype(np.uint64)


def unpack(bits: UInt64, num_columns: int) -> Bool:
    """The mask, bool [rows, columns], of the words of `pack`."""
    data = bits.astype("<u8", copy=False).view(np.uint8)
    return np.unpackbits(data, axis=1, count=num_columns, bitorder="little").view(np.bool_)
