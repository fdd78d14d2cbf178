"""What several Triton kernels share: types of products, activations, launches, tiles of weights.

Importing this file needs Triton.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver


def triton_type(dtype: torch.dtype) -> tl.dtype:
    """Triton's name for a float type."""
    return {
        torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
    }[dtype]  # fmt: skip


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """The type that `tl.dot` multiplies in, for inputs of `dtype`.

    float32 under the interpreter, which multiplies bfloat16 as integers.
    """
    return tl.float32 if knobs.runtime.interpret else triton_type(dtype)


SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)
GELU_CUBE = tl.constexpr(0.044715)


@triton.jit
def activated(x, IS_GELU: tl.constexpr):
    """SiLU, or GELU by its tanh formula, of float32 numbers."""
    # (1 + tanh(y)) / 2 is the sigmoid of 2 y.
    inner = SQRT_8_OVER_PI * (x + GELU_CUBE * x * x * x) if IS_GELU else x
    # Bounded, so that exp stays finite.
    return x / (1.0 + tl.exp(tl.minimum(-inner, 88.0)))


# Programmatic dependent launch: a kernel starts while the one before it ends, and waits before it
# reads. Compute capability from which on devices can.
LEAST_CAPABILITY = (9, 0)


@triton.jit
def await_inputs(DEPENDS: tl.constexpr):
    """Must be called first in a kernel, before it reads or writes anything.

    Allows the launch of the next kernel, then waits for the previous kernels to end. So a chain of
    such kernels sees the same memory as serial launches.
    """
    if DEPENDS:
        gdc_launch_dependents()
        gdc_wait()


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Constant and launch option of kernels that call `await_inputs`."""
    is_compiled = device.type == "cuda" and not knobs.runtime.interpret
    depends = is_compiled and _capability(device.index) >= LEAST_CAPABILITY
    return {"DEPENDS": depends, "launch_pdl": depends}


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


# Tiles of products of few rows, which are bound by reading weights. With more outputs a program,
# rows are read less often. Sizes were tuned on an H200.
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
