"""A linear layer for few rows whose weight lies in panels of columns (`kernels/cpu/linear.cpp`).

A library's product of two to eight rows takes twice the time of one row; this one takes hardly
more than one. A row's result is the same, bit by bit, whatever rows are beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def pack_weight(weight: Tensor, panel: int) -> Tensor:
    """`weight` [inputs, outputs] -> [panels, inputs, panel], the last panel filled with zeros."""
    inputs, outputs = weight.shape
    panels = -(-outputs // panel)
    whole = pad(weight, (0, panels * panel - outputs))
    return whole.view(inputs, panels, panel).transpose(0, 1).contiguous()


def packed_linear(x: Tensor, weight: Tensor, outputs: int) -> Tensor:
    """`x` [rows, inputs] times a packed weight -> [rows, outputs], float32.

    Needs `kernels.cpu.build.load_cpu_ops` first.
    """
    return torch.ops.draftline.packed_linear(x, weight, outputs)
