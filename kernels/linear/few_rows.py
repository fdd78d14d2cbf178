"""Linear layers in Triton for up to `MOST_FEW_ROWS` rows; importing needs Triton.

So few rows are bound by the bandwidth of reading weights. Every sum runs over the inputs in order,
in tiles that depend only on the layer and the row tile (16, 32 or 64). Gated activations, and norms
of slices of the inputs, are fused into the product.
"""

# Triton accepts plain numbers for constexpr parameters, whatever their annotation.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..shared_kernels import LEAST_ROWS, OUTPUTS, dependent_launch, dot_type, num_stages
from . import reference as linear_reference
from .linear_kernels import multiply_few_rows, multiply_normed_rows
from .reference import MOST_FEW_ROWS

# Bytes of a row's inputs in a tile, by those of a number. Factors of float32 are multiplied in
# registers, which hold fewer.
TILE_BYTES = {2: 256, 4: 128}
LAUNCH = {"num_warps": 4, "enable_fp_fusion": True}


def few_rows_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    activation: str | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`x` [rows, inputs] times a weight; see `kernels/linear/reference.py`."""
    num_rows, num_inputs = x.shape
    is_gated = activation is not None
    num_outputs = len(weight) // 2 if is_gated else len(weight)
    assert num_rows <= MOST_FEW_ROWS
    assert x.dtype == weight.dtype
    assert x.stride(1) == weight.stride(1) == 1
    out = x.new_empty(num_rows, num_outputs, dtype=out_dtype)
    if not num_rows:
        return out
    sizes = tile_sizes(num_rows, x.dtype)
    num_programs = triton.cdiv(num_outputs, OUTPUTS)
    multiply_few_rows[num_programs,](
        x, weight, out if bias is None else bias, out, num_rows, num_outputs, num_inputs,
        x.stride(0), weight.stride(0), out.stride(0),
        IS_WHOLE=num_inputs % sizes["INPUTS"] == 0, HAS_BIAS=bias is not None,
        IS_GATED=is_gated, IS_GELU=activation == "gelu_tanh", DOT=dot_type(x.dtype), **sizes,
        num_stages=num_stages(
            x.device, num_programs, tile_bytes(sizes, x.dtype, is_gated=is_gated),
            is_gated=is_gated,
        ),
        **dependent_launch(x.device), **LAUNCH,
    )  # fmt: skip
    return out


def normed_linear(x: Tensor, weight: Tensor, num_norms: int, eps: float) -> Tensor:
    """Norms of slices of `x` [rows, inputs], and the product; see `kernels/linear/reference.py`.

    More than `MOST_FEW_ROWS` rows, which are bound by compute, are computed as there.
    """
    num_rows, num_inputs = x.shape
    if num_rows > MOST_FEW_ROWS:
        return linear_reference.normed_linear(x, weight, num_norms, eps)
    num_outputs = len(weight)
    assert num_inputs % num_norms == 0
    assert x.dtype == weight.dtype
    assert x.stride(1) == weight.stride(1) == 1
    out = x.new_empty(num_rows, num_outputs)
    if not num_rows:
        return out
    sizes = tile_sizes(num_rows, x.dtype)
    num_programs = triton.cdiv(num_outputs, OUTPUTS)
    multiply_normed_rows[num_programs,](
        x, weight, out, eps, num_rows, num_outputs, x.stride(0), weight.stride(0), out.stride(0),
        NUM_NORMS=num_norms, SIZE=num_inputs // num_norms, DOT=dot_type(x.dtype), **sizes,
        num_stages=num_stages(
            x.device, num_programs, tile_bytes(sizes, x.dtype, is_gated=False), is_gated=False
        ),
        **dependent_launch(x.device), **LAUNCH,
    )  # fmt: skip
    return out


def tile_sizes(num_rows: int, dtype: torch.dtype) -> dict[str, int]:
    """ROWS, OUTPUTS and INPUTS of a program."""
    return {
        "ROWS": max(triton.next_power_of_2(num_rows), LEAST_ROWS),
        "OUTPUTS": OUTPUTS,
        "INPUTS": TILE_BYTES[dtype.itemsize] // dtype.itemsize,
    }


def tile_bytes(sizes: dict[str, int], dtype: torch.dtype, *, is_gated: bool) -> int:
    """Shared memory of a tile of inputs: those of all rows, and the weights of all outputs."""
    lines = sizes["ROWS"] + sizes["OUTPUTS"] * (2 if is_gated else 1)
    return lines * sizes["INPUTS"] * dtype.itemsize
