"""Heads by draftline's CPU kernels.

A draft cannot change a text, so a head may round: its weights are kept in 8 bits, of which a level
of a draft reads a quarter of the bytes, and on processors with dot products of bytes its inputs are
rounded to as many.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...kernels.cpu.build import are_loaded, vectors
from ...kernels.cpu.packed_linear import pack_quantized, placed
from ..layers.linear_layers import CpuLinear
from ..load.rounding import rounded


def use_cpu_kernels(head: nn.Module) -> None:
    """Give float32 linear layers and RMS norms on a CPU the products and norms of draftline's
    kernels, if this process has loaded them; weights are rounded to int8.

    The layers keep their types. Those with weights that are not finite stay torch's.
    """
    if not are_loaded():
        return
    for layer in head.modules():
        if not (isinstance(layer, nn.Linear) or type(layer) is nn.RMSNorm):
            continue
        weight = layer.weight.detach()
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            continue
        if isinstance(layer, nn.RMSNorm):
            forward = _Norm(weight, layer.eps)
        elif weight.isfinite().all():
            forward = _rounded(layer).forward
            layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
        else:
            continue
        layer.forward = forward  # pyright: ignore[reportAttributeAccessIssue]


def _rounded(layer: nn.Linear) -> CpuLinear:
    weight = rounded(layer.weight.detach(), "int8")
    packed = pack_quantized(weight.codes, weight.scales, None, weight.group_of, vectors())
    assert packed is not None, "the kernels know int8"
    product = CpuLinear(placed(packed), layer.out_features, is_rough=True)
    product.bias = layer.bias
    return product


class _Norm:
    """An RMS norm over the last dimension."""

    __slots__ = ("_eps", "_weight")

    def __init__(self, weight: Tensor, eps: float | None) -> None:
        self._weight = weight
        self._eps = torch.finfo(torch.float32).eps if eps is None else eps

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.draftline.rms_norm(x, self._weight, self._eps)
