"""The types that Triton kernels multiply in. Importing this file needs Triton."""

from __future__ import annotations

import torch
import triton.language as tl
from triton import knobs


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
