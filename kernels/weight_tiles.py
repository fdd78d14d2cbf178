"""Tiles of products of few rows, which are bound by the bandwidth of reading weights.

A program reads the weights of some outputs and all rows. With more outputs a program, rows are read
less often; with more tiles in flight, the memory is busier. Sizes were tuned on an H200
(CONTRIBUTING.md). Importing needs Triton.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

# The minimum of `tl.dot`.
LEAST_ROWS = 16
# Outputs of a program: as many lines as tensor cores take at once.
OUTPUTS = 64
# Tiles in flight. If every program has its own multiprocessor, enough to saturate the memory; if
# several share one, fewer, so that the next kernel's programs fit beside them.
STAGES_ALONE, STAGES, STAGES_OF_GATED = 6, 3, 4
MULTIPROCESSORS = 132
# From this compute capability on, tensor cores read tiles from shared memory; before, one tile is
# in registers.
READS_SHARED = (9, 0)


def num_stages(device: torch.device, num_programs: int, tile_bytes: int, *, is_gated: bool) -> int:
    """Number of tiles of `tile_bytes` in flight at once, as many as fit."""
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
    """Pipeline stages, at most `wanted`, that fit this many bytes of shared memory."""
    in_registers = 0 if capability >= READS_SHARED else 1
    return min(wanted, shared_bytes // tile_bytes + in_registers)


@cache
def _facts(index: int | None) -> tuple[int, tuple[int, int]]:
    """Shared memory of a program, bytes, and compute capability."""
    index = torch.cuda.current_device() if index is None else index
    utils: Any = driver.active.utils  # pyright: ignore[reportAttributeAccessIssue] - of a GPU's
    shared_bytes: int = utils.get_device_properties(index)["max_shared_mem"]
    return shared_bytes, torch.cuda.get_device_capability(index)
