"""A linear layer whose weight lies in panels of columns (`kernels/cpu/source/linear.cpp`).

A library's product of two to eight rows takes twice the time of one row; this one takes hardly more
than one row. A row's result is bitwise independent of the other rows and of the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pack_weights(weights: Sequence[Tensor], panel: int) -> Tensor:
    """Weights [inputs, outputs] side by side -> [panels, inputs, panel]. The last panel is padded
    with zeros.

    In bfloat16 if that has all their values, as of a checkpoint in bfloat16; else float32.
    """
    inputs = weights[0].shape[0]
    outputs = sum(weight.shape[1] for weight in weights)
    packed = weights[0].new_zeros(-(-outputs // panel), inputs, panel)
    first = 0
    for weight in weights:
        last = first + weight.shape[1]
        for index in range(first // panel, -(-last // panel)):
            begin, end = max(first, index * panel), min(last, (index + 1) * panel)
            columns = slice(begin - index * panel, end - index * panel)
            packed[index, :, columns] = weight[:, begin - first : end - first]
        first = last
    half = packed.bfloat16()
    return half if torch.equal(half.float(), packed) else packed


def packed_linear(x: Tensor, weight: Tensor, outputs: int) -> Tensor:
    """`x` [rows, inputs] times a packed weight -> [rows, outputs], float32.

    Needs `kernels.cpu.build.load_cpu_ops` first.
    """
    return torch.ops.draftline.packed_linear(x, weight, outputs)
