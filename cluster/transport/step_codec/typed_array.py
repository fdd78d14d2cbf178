"""Checks of arrays before compiled loops read them, on both ends of a message."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ....core.arrays import Int32
from ....core.errors import ProtocolError

# Entries of the largest table that is kept: half a gigabyte.
MAX_ENTRIES = 1 << 27


def typed(array: NDArray[Any], dtype: DTypeLike, num_dims: int, name: str) -> NDArray[Any]:
    """The array, contiguous. Raises `TypeError` for one of another type or shape."""
    if array.dtype != dtype or array.ndim != num_dims:
        raise TypeError(f"{name} is {array.dtype} of {array.ndim} dimensions")
    return np.ascontiguousarray(array)


def expect(condition: bool | np.bool_, what: str) -> None:
    """Raise `ProtocolError` unless the message keeps this."""
    if not condition:
        raise ProtocolError(f"not a message between stages: {what}")


def expect_flat(name: str, *arrays: NDArray[Any]) -> None:
    """Raise `ProtocolError` unless all arrays have one dimension."""
    for array in arrays:
        expect(array.ndim == 1, f"{name} are no flat arrays")


def ends_of(lengths: Int32, total: int, name: str) -> list[int]:
    """Where parts of these lengths end in an array of `total` entries, which they fill.

    Raises `ProtocolError` where they do not.
    """
    own = lengths.tolist()
    expect(min(own, default=0) >= 0, f"{name} have lengths below 0")
    ends = list(accumulate(own))
    expect((ends[-1] if ends else 0) == total, f"{name} are cut short or too many")
    return ends
