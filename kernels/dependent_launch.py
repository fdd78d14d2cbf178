"""Kernels that a GPU begins to launch while those before them end; importing needs Triton.

What a kernel does before it waits overlaps with the end of the one before it: its launch, above
all (programmatic dependent launch, from compute capability 9.0 on).
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
    """First in a kernel, before it reads or writes anything.

    The next kernel may be launched from now on; it waits here until this one has ended, as this one
    waits for those before it. So a chain of them sees the memory that launches one by one would.
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
