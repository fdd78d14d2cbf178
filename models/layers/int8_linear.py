"""Linear layers whose weights are kept as 8-bit integers: half of bfloat16's memory.

Only weights are rounded, to 127 steps with one scale for each output; the arithmetic stays the
same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ...core.errors import ConfigError
from ...kernels.dispatch import Machine, load_int8_linear, runs_triton

NONE = "none"
QUANTIZATIONS = (NONE, "int8")
LARGEST = 127


class Int8Linear(nn.Module):
    """weight int8 [outputs, inputs], scales float32 [outputs], bias as of the layer it replaces."""

    def __init__(self, weight: Tensor) -> None:
        """`weight` of a linear layer without a bias, which may be set later."""
        super().__init__()
        scales = weight.abs().amax(dim=1).float().clamp(min=torch.finfo(torch.float32).tiny)
        scales /= LARGEST
        rounded = (weight.float() / scales[:, None]).round().to(torch.int8)
        self.weight = nn.Parameter(rounded, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        implementation = "triton" if runs_triton(Machine.of(weight.device)) else "reference"
        self.product = load_int8_linear(implementation)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., inputs] -> [..., outputs]."""
        rows = x.reshape(-1, x.shape[-1])
        return self.product(rows, self.weight, self.scales, self.bias).view(*x.shape[:-1], -1)


def check_quantization(quantization: str) -> None:
    """Raise `ConfigError` for one that is unknown."""
    if quantization not in QUANTIZATIONS:
        known = " or ".join(QUANTIZATIONS)
        raise ConfigError("quantization", f"must be {known}, not {quantization!r}")


def is_quantized(model: nn.Module, name: str) -> bool:
    """Whether a parameter is the weight of a linear layer that is not the head."""
    module, _, attribute = name.rpartition(".")
    if attribute != "weight" or "." not in module:
        return False
    return isinstance(model.get_submodule(module), nn.Linear | Conv1D)


def put_quantized(model: nn.Module, name: str, weight: Tensor) -> None:
    """Replace the layer of which `name` is the weight."""
    parent, _, child = name.removesuffix(".weight").rpartition(".")
    owner = model.get_submodule(parent)
    # GPT-2 has it [inputs, outputs].
    is_turned = isinstance(getattr(owner, child), Conv1D)
    setattr(owner, child, Int8Linear(weight.t().contiguous() if is_turned else weight))
