"""Machine code for loops over numpy arrays that run for every node of every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, compiled by numba at its first call and kept on disk for the next process."""
    return cast("Callable[P, R]", numba.njit(cache=True)(function))
