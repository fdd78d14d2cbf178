"""A linear layer, by torch alone."""

from __future__ import annotations

import torch
from torch import Tensor


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` [rows, inputs] times `weight` [inputs, outputs] of the same dtype, plus `bias` [outputs].

    Gives [rows, outputs] in that dtype. Of this one, how a row is rounded may depend on the number
    of rows.
    """
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
