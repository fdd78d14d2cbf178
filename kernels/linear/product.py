"""A batch-invariant linear layer in Triton. Importing needs Triton.

Libraries choose tiles and split sums by the shape of the whole product. Here a weight has one
configuration for any number of rows, and every sum runs over the inputs in order. A tile has 64
rows: fewer would read the weights of a prompt too often. With more, the padding of a single row
would take longer than reading the weights. See He et al., "Defeating Nondeterminism in LLM
Inference" (2025).
"""

# Triton accepts plain numbers for constexpr parameters, whatever their annotation.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..shared_kernels import dot_type
from .linear_kernels import multiply_rows

ROWS = 64
# Bytes of a row's inputs in a tile: tiles of all stages fit the shared memory of any GPU.
TILE_BYTES = 128
# Outputs of a program; fewer if the programs were too few to saturate the memory.
OUTPUTS = (64, 32, 16)
LEAST_PROGRAMS = 48
LAUNCH = {"num_warps": 4, "num_stages": 6, "enable_fp_fusion": True}


def invariant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`x` [rows, inputs] times a weight; see `kernels/linear/reference.py`.

    The weight may have any strides, such as that of a head tied to the embedding.
    """
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[1]
    assert len(weight) == num_inputs
    assert x.dtype == weight.dtype
    assert x.stride(1) == 1
    out = x.new_empty(num_rows, num_outputs, dtype=out_dtype)
    if not num_rows:
        return out
    sizes = tile_sizes(num_outputs, x.dtype)
    grid = triton.cdiv(num_rows, ROWS), triton.cdiv(num_outputs, sizes["OUTPUTS"])
    multiply_rows[grid](
        x, weight, out if bias is None else bias, out, num_rows, num_outputs, num_inputs,
        x.stride(0), weight.stride(0), weight.stride(1), out.stride(0),
        IS_WHOLE=num_inputs % sizes["INPUTS"] == 0, HAS_BIAS=bias is not None,
        DOT=dot_type(x.dtype), **sizes, **LAUNCH,
    )  # fmt: skip
    return out


def tile_sizes(num_outputs: int, dtype: torch.dtype) -> dict[str, int]:
    """ROWS, OUTPUTS and INPUTS of a program; the same for any number of rows."""
    outputs = next(
        (count for count in OUTPUTS if triton.cdiv(num_outputs, count) >= LEAST_PROGRAMS),
        OUTPUTS[-1],
    )
    return {"ROWS": ROWS, "OUTPUTS": outputs, "INPUTS": TILE_BYTES // dtype.itemsize}
