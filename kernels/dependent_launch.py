"""Programmatic dependent launch: a kernel starts while the previous one ends. Importing needs
Triton.

The work of a kernel before its wait, above all its launch, overlaps with the end of the previous
kernel. Needs compute capability 9.0.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST_CAPABILITY = (9, 0)


@triton.jit
def await_inputs(DEPENDS: tl.constexpr):  # noqa: N803 - constants of kernels are in capitals
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
