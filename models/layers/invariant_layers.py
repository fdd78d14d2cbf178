"""A slice with batch-invariant products on GPUs, for `batch_invariant: on`.

The operators between the products (`fused_modules.py`) are already row-wise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...kernels.dispatch import load_invariant_linear
from .gpu_linear import GpuHead, GpuLinear
from .model_slice import ModelSlice


class InvariantLinear:
    """A linear layer; `weight` [inputs, outputs] of any strides."""

    __slots__ = ("_out_dtype", "_product", "bias", "weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None, product: Callable[..., Tensor],
        out_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """`product` is an `invariant_linear` of `kernels/linear/`."""
        self.weight, self.bias, self._product = weight, bias, product
        self._out_dtype = out_dtype

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [rows, inputs] -> [rows, outputs]."""
        return self._product(x, self.weight, self.bias, out_dtype=self._out_dtype)

    def gated(self, x: Tensor, activation: str) -> Tensor | None:  # noqa: ARG002 - as `GpuLinear`
        """None: its product has no gate."""
        return None


def make_invariant(part: ModelSlice, implementation: str = "triton") -> ModelSlice:
    """`part`, of fused modules, with other products; its modules are changed, no weight is copied.

    `implementation` is a name for `load_invariant_linear`.
    """
    assert part.fast
    product = load_invariant_linear(implementation)
    for layer in part.layers:
        for module in list(layer.modules()):
            _replace_products(module, product)
    head = part.head
    if isinstance(head, GpuHead):
        # Logits stay in the dtype of the sums.
        head = InvariantLinear(head.weight.t(), head.bias, product, torch.float32)
    return replace(part, head=head)


def _replace_products(module: nn.Module, product: Callable[..., Tensor]) -> None:
    for name, child in [*vars(module).items(), *module.named_children()]:
        if isinstance(child, GpuLinear):
            setattr(module, name, InvariantLinear(child.weight.t(), child.bias, product))
        elif isinstance(child, nn.Linear):
            # A module attribute only accepts modules.
            delattr(module, name)
            setattr(module, name, _invariant(child, product))


def _invariant(linear: nn.Linear, product: Callable[..., Tensor]) -> InvariantLinear:
    return InvariantLinear(linear.weight.t(), linear.bias, product)
