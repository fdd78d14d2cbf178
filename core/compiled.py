"""Machine code for loops over numpy arrays that run for every node of every step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core import config

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
        if b"import compiled" in source or file == Path(__file__):
            digest.update(source)
    return str(Path(__file__).parent / "__pycache__" / f"compiled-{digest.hexdigest()[:16]}")
