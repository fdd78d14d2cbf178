"""How `compiled.py` does without numba: functions stay as they are written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function itself, whose sums of fixed width wrap as compiled ones do, without a warning."""

    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        with np.errstate(over="ignore"):
            return function(*args, **kwargs)

    return plain


def pointer(address: int) -> int:
    """The address."""
    return address


def carray(address: int, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """The array of this shape at an address; a view, as numba's."""
    sizes = shape if isinstance(shape, tuple) else (shape,)
    kind = np.dtype(dtype)
    num_bytes = int(np.prod(sizes, dtype=np.int64)) * kind.itemsize
    raw = (ctypes.c_char * num_bytes).from_address(int(address))
    return np.frombuffer(raw, dtype=kind).reshape(sizes)


def prefetch(address: int) -> None:
    """Nothing: it is a hint."""
