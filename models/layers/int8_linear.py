"""Linear layers whose weights are kept as 8-bit integers: half of bfloat16's memory.

Weights alone are rounded, each output's to 127 steps of its own size; arithmetic stays as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...core.errors import ConfigError
from ...kernels.dispatch import Machine, load_int8_linear, runs_triton
from .int4_linear import GROUP_SIZE, LOT, Int4Linear, fits_int4

NONE, INT8, INT4 = QUANTIZATIONS = ("none", "int8", "int4")
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


def check_quantization(quantization: str, device: str) -> None:
    """Raise `ConfigError` for one that is unknown (`quantization`), or for int4, which only a
    drafter's `weights` say, where the device has no product for it.
    """
    if quantization not in QUANTIZATIONS:
        known = " or ".join(QUANTIZATIONS)
        raise ConfigError("quantization", f"must be {known}, not {quantization!r}")
    if quantization == INT4 and torch.device(device).type != "cpu":
        raise ConfigError("weights", f"int4 is for CPUs, and the device is {device}: use int8")


def check_rounded(num_rounded: int, quantization: str, model: str) -> None:
    """Raise `ConfigError` where int4 was said, and no layer of a model has a product for it."""
    if quantization == INT4 and not num_rounded:
        raise ConfigError(
            "weights",
            f"int4 fits no layer of {model}: its inputs must be a multiple of {GROUP_SIZE}, its "
            f"outputs of {LOT}; use int8",
        )


def is_quantized(model: nn.Module, name: str) -> bool:
    """Whether a parameter is the weight of a linear layer within the model's decoder layers."""
    module, _, attribute = name.rpartition(".")
    in_layers = ".layers." in f".{module}"
    return (
        attribute == "weight" and in_layers and isinstance(model.get_submodule(module), nn.Linear)
    )


def put_quantized(model: nn.Module, name: str, weight: Tensor, quantization: str) -> bool:
    """Replace the layer of which `name` is the weight, unless it must stay as it is."""
    rounded = rounded_layer(weight, quantization)
    if rounded is None:
        return False
    parent, _, child = name.removesuffix(".weight").rpartition(".")
    setattr(model.get_submodule(parent), child, rounded)
    return True


def rounded_layer(weight: Tensor, quantization: str) -> nn.Module | None:
    """A layer of a rounded weight, without a bias; None: there is no product for its shape."""
    if quantization == INT8:
        return Int8Linear(weight)
    return Int4Linear(weight) if fits_int4(weight) else None
