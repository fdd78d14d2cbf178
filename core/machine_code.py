"""How `compiled.py` compiles, by numba."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic
from numba.np.numpy_support import carray

# What is compiled into every function.
OWN_FILES = ("compiled.py", "machine_code.py")
P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, compiled by numba at its first call and kept on disk for the next process."""
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
    for file in sorted(package.glob("*/**/*.py")):
        source = file.read_bytes()
        if b"compiled import" in source or file.name in OWN_FILES:
            digest.update(source)
    return str(Path(__file__).parent / "__pycache__" / f"compiled-{digest.hexdigest()[:16]}")


def _typed_pointer(_context: Any, address: Any) -> Any:
    """An address as a pointer, which `carray` makes an array of."""

    def build(_target: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(address), build


pointer = cast("Callable[[int], Any]", intrinsic(_typed_pointer))


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


prefetch = cast("Callable[[int], None]", intrinsic(_prefetching))
