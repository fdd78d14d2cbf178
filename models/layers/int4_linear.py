"""Linear layers whose weights are kept in 4 bits, by torch's own product for CPUs.

In groups of 32 inputs, each output's to 15 steps between the group's least and largest. Weights
alone are rounded; products are of bfloat16 numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

GROUP_SIZE = 32
# Outputs come in such lots in torch's layout.
LOT = 16
STEPS = 15
# Of the numbers 0 to 15 the one that stands for a group's `middle`.
MIDDLE = 8


def fits_int4(weight: Tensor) -> bool:
    """Whether torch has a product for a weight of this shape, on its device."""
    outputs, inputs = weight.shape
    return weight.device.type == "cpu" and outputs % LOT == 0 and inputs % GROUP_SIZE == 0


class Int4Linear(nn.Module):
    """packed uint8 [outputs, inputs / 2], of torch's layout; scales bfloat16 [groups, outputs, 2],
    step and middle of each group; bias as of the layer it replaces.
    """

    def __init__(self, weight: Tensor) -> None:
        """`weight` [outputs, inputs] of a linear layer, for which `fits_int4`; its bias may be set
        later.
        """
        super().__init__()
        outputs, inputs = weight.shape
        groups = weight.float().reshape(outputs, inputs // GROUP_SIZE, GROUP_SIZE)
        least = groups.amin(dim=-1)
        steps = (groups.amax(dim=-1) - least).clamp(min=torch.finfo(torch.float32).tiny) / STEPS
        numbers = ((groups - least[..., None]) / steps[..., None]).round().clamp(0, STEPS)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(  # noqa: SLF001 - no public name yet
            numbers.to(torch.int32).reshape(outputs, inputs), 1
        )
        scales = torch.stack([steps, least + MIDDLE * steps], dim=-1).transpose(0, 1)
        self.packed = nn.Parameter(packed, requires_grad=False)
        scales = scales.contiguous().to(torch.bfloat16)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., inputs] -> [..., outputs]."""
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(  # noqa: SLF001 - no public name yet
            rows, self.packed, GROUP_SIZE, self.scales
        )
        out = out.to(x.dtype).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias
