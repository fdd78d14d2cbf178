"""Machine code for loops over numpy arrays that run for every node of every step.

Compiled code knows arrays by their type and count. Where one call is to work on the arrays of any
number of requests or segments, these go in as rows of addresses and sizes (`address_of`), and
`int32_at` and its like make arrays of them again. Whoever holds the rows must hold the arrays, too.

Without numba, or beside a numpy that it does not know, the same functions run as they are written,
a hundred times slower: enough to measure and test kernels on a machine that lacks it.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from .arrays import Int32, Int64

try:
    from .machine_code import carray, compiled, pointer, prefetch
except ImportError as error:
    from .plain_code import carray, compiled, pointer, prefetch

    logging.getLogger(__name__).warning(
        "event=not_compiled reason=%s; loops run in plain Python, far too slow to serve", error
    )

__all__ = [
    "address_of", "carray", "compiled", "int32_at", "int32_rows_at", "int64_at", "pointer",
    "prefetch",
]  # fmt: skip


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Where the data of an array begins. It must be contiguous, and held by whoever uses this."""
    assert array.flags.c_contiguous
    assert array.flags.aligned
    return array.ctypes.data


@compiled
def int32_at(address: int, size: int) -> Int32:
    """int32 [size] at an address."""
    return carray(pointer(address), size, np.int32)


@compiled
def int32_rows_at(address: int, rows: int, columns: int) -> Int32:
    """int32 [rows, columns] at an address."""
    return carray(pointer(address), (rows, columns), np.int32)


@compiled
def int64_at(address: int, size: int) -> Int64:
    """int64 [size] at an address."""
    return carray(pointer(address), size, np.int64)
