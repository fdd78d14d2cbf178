"""Machine code for loops over numpy arrays that run for every node of every step.

Compiled code knows arrays by their type and count. Where one call is to work on the arrays of any
number of requests or segments, these go in as rows of addresses and sizes (`address_of`), and
`int32_at` and its like make arrays of them again. Whoever holds the rows must hold the arrays, too.

Without numba, or beside a numpy that it does not know, the same functions run as they are written,
a hundred times slower: enough to measure and test kernels on a machine that lacks it.
"""

# Names of numba are used where it is there.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from .arrays import Int32, Int64

try:
    import numba
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils, config
    from numba.extending import intrinsic
    from numba.np.numpy_support import carray as compiled_carray
except ImportError as error:
    HAS_NUMBA = False
    logging.getLogger(__name__).warning(
        "event=not_compiled reason=%s; loops run in plain Python, far too slow to serve", error
    )
else:
    HAS_NUMBA = True

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, compiled by numba at its first call and kept on disk for the next process."""
    if not HAS_NUMBA:
        return _plain(function)
    settings: Any = config
    given = settings.CACHE_DIR
    settings.CACHE_DIR = given or _own_folder()
    try:
        return cast("Callable[P, R]", numba.njit(cache=True)(function))
    finally:
        settings.CACHE_DIR = given


@cache
def _own_folder() -> str:
    """Where code that was compiled from these very sources is kept.

    numba looks whether a function's own file has changed, not whether those of its callees have;
    and code that was compiled against other callees does not fail, it reads wrong memory.
    """
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    # A checkout may hold a virtual environment, of 20,000 files that none of this reads.
    for file in sorted(package.glob("[!.]*/**/*.py")):
        source = file.read_bytes()
        if b"compiled import" in source or file == Path(__file__):
            digest.update(source)
    return str(Path(__file__).parent / "__pycache__" / f"compiled-{digest.hexdigest()[:16]}")


def _plain(function: Callable[P, R]) -> Callable[P, R]:
    """The function as it is; numbers of fixed width wrap as compiled ones do, without a warning."""

    @wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        with np.errstate(over="ignore"):
            return function(*args, **kwargs)

    return plain


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Where the data of an array begins, which must be contiguous and kept by the caller."""
    assert array.flags.c_contiguous
    assert array.flags.aligned
    return array.ctypes.data


def _typed_pointer(_context: Any, address: Any) -> Any:
    """An address as a pointer, which `carray` makes an array of."""

    def build(_target: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(address), build


def _prefetching(_context: Any, address: Any) -> Any:
    """The processor's hint that the line of memory at an address will be read soon."""

    def build(_target: Any, builder: Any, _signature: Any, values: Any) -> Any:
        int32, byte_pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        hint = ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32])
        name = f"llvm.prefetch.{byte_pointer.intrinsic_name}"
        function = cgutils.get_or_insert_function(builder.module, hint, name)
        line = builder.inttoptr(values[0], byte_pointer)
        # To read, to be kept in all caches, data.
        builder.call(function, [line, int32(0), int32(3), int32(1)])
        return _target.get_dummy_value()

    return types.none(address), build


def plain_carray(address: int, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """The array of this shape at an address; a view, as numba's."""
    sizes = shape if isinstance(shape, tuple) else (shape,)
    kind = np.dtype(dtype)
    num_bytes = int(np.prod(sizes, dtype=np.int64)) * kind.itemsize
    raw: Any = (ctypes.c_char * num_bytes).from_address(int(address))
    return np.frombuffer(raw, dtype=kind).reshape(sizes)


def _plain_pointer(address: int) -> Any:
    return address


def _plain_prefetch(_address: int) -> None:
    pass


Carray = Callable[..., np.ndarray[Any, Any]]
carray: Carray = compiled_carray if HAS_NUMBA else plain_carray
pointer: Any = intrinsic(_typed_pointer) if HAS_NUMBA else _plain_pointer
prefetch: Any = intrinsic(_prefetching) if HAS_NUMBA else _plain_prefetch


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
