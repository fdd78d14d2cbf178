"""The experts of a mixture by draftline's CPU kernels (`kernels/cpu/source/experts.cpp`)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

from .packed_linear import NOTHING, PackedWeight


class Activation(IntEnum):
    """x * sigmoid(alpha * x), GELU by tanh, or max(x, 0)^2; the operator's numbering."""

    SWISH = 0
    GELU_TANH = 1
    SQUARED_RELU = 2


class Gate(NamedTuple):
    """What stands between an expert's products: activation(left) * (right + shift), with both at
    most `limit` and the right ones at least -`limit`. Without a gate the activation alone."""

    activation: Activation
    alpha: float = 1.0
    limit: float = inf
    shift: float = 0.0

    def __call__(self, left: Tensor, right: Tensor | None) -> Tensor:
        """By torch alone; `right` None: there is no gate."""
        if right is None:
            return self._active(left)
        return self._active(left.clamp(max=self.limit)) * (
            right.clamp(-self.limit, self.limit) + self.shift
        )

    def _active(self, x: Tensor) -> Tensor:
        if self.activation is Activation.SWISH:
            return x * torch.sigmoid(self.alpha * x)
        if self.activation is Activation.GELU_TANH:
            return gelu(x, approximate="tanh")
        return x.relu().square()


class ExpertMatrix(NamedTuple):
    """A matrix of all experts: stacks of packed weights, whose outputs lie side by side.

    stacks  `stacked`
    widths  outputs of each
    bias    float32 [experts, outputs]
    """

    stacks: tuple[PackedWeight, ...]
    widths: tuple[int, ...]
    bias: Tensor | None = None


def stacked(weights: Sequence[PackedWeight]) -> PackedWeight | None:
    """The weights of all experts as one, the panels of one behind those of another; None where
    their kinds differ. Its `groups` are those of each expert, [experts, ..], where these differ."""
    if len({one.scales.dtype for one in weights}) > 1:
        weights = [
            one._replace(scales=one.scales.float(), minima=one.minima.float()) for one in weights
        ]
    first = weights[0]
    if len({(one.codes.dtype, *(part.shape[1:] for part in one)) for one in weights}) > 1:
        return None
    groups = first.groups
    if any(not torch.equal(one.groups, groups) for one in weights):
        groups = torch.stack([one.groups for one in weights])
    codes, scales, zeros, minima = (
        _concatenated([getattr(one, name) for one in weights])
        for name in ("codes", "scales", "zeros", "minima")
    )
    return PackedWeight(codes, scales, zeros, groups, minima)


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    if not parts[0].numel():
        return NOTHING
    # Bytes, since torch does not join all formats of 8 bits.
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def run_experts(
    x: Tensor, chosen: Tensor, shares: Tensor, num_experts: int, up: ExpertMatrix,
    down: ExpertMatrix, gate: Gate,
) -> Tensor:  # fmt: skip
    """float32 [rows, hidden] of the same: the shares of each row's experts, summed.

    chosen  int64 [rows, choices]  experts; others than the `num_experts` add nothing
    shares  float32 [rows, choices]
    up      of [rows, hidden]; gates first where it has twice the inputs of `down`

    A row's result is bitwise independent of the other rows and of the number of threads. Needs
    `kernels.cpu.build.load_cpu_ops` first.
    """
    [second] = down.stacks
    return torch.ops.draftline.run_experts(
        x.contiguous(), chosen.contiguous(), shares.contiguous(), num_experts,
        [part for stack in up.stacks for part in stack], up.widths, up.bias, second, down.bias,
        gate.activation, gate.alpha, gate.limit, gate.shift,
    )  # fmt: skip
