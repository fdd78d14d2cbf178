"""Tiles of products of few rows, which take as long as reading their weights does.

A program reads the weights of some outputs and all rows. So the more outputs it has, the less often
rows are read; and the more tiles of inputs are on their way, the busier the memory is. Sizes were
tried on an H200 (CONTRIBUTING.md). Importing needs Triton.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

# `tl.dot` takes no fewer.
LEAST_ROWS = 16
# Of a program: as many lines as tensor cores take at once.
OUTPUTS = 64
# Tiles on their way. Where every program has a multiprocessor of its own, as many as keep it
# reading; where several share one, fewer, so that the next kernel's fit in beside them.
STAGES_ALONE, STAGES, STAGES_OF_GATED = 6, 3, 4
MULTIPROCESSORS = 132
# From here on tensor cores read tiles where they lie; before, one tile is in registers.
READS_SHARED = (9, 0)


def num_stages(device: torch.device, num_programs: int, tile_bytes: int, *, is_gated: bool) -> int:
    """Tiles of `tile_bytes` that are on their way at once, as many as there is room for."""
    if num_programs <= MULTIPROCESSORS:
        wanted = STAGES_ALONE
    else:
        wanted = STAGES_OF_GATED if is_gated else STAGES
    if device.type != "cuda" or knobs.runtime.interpret:
        return wanted
    shared_bytes, capability = _facts(device.index)
    return stages_within(wanted, tile_bytes, shared_bytes, capability)


def stages_within(
    wanted: int, tile_bytes: int, shared_bytes: int, capability: tuple[int, int]
) -> int:
    """Stages, `wanted` at most, for which shared memory of so many bytes suffices."""
    in_registers = 0 if capability >= READS_SHARED else 1
    return min(wanted, shared_bytes // tile_bytes + in_registers)


@cache
def _facts(index: int | None) -> tuple[int, tuple[int, int]]:
    """Shared memory of a program, bytes, and compute capability."""
    index = torch.cuda.current_device() if index is None else index
    utils: Any = driver.active.utils  # pyright: ignore[reportAttributeAccessIssue] - of a GPU's
    shared_bytes: int = utils.get_device_properties(index)["max_shared_mem"]
    return shared_bytes, torch.cuda.get_device_capability(index)
