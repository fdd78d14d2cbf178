"""Linear layers that are not torch's: of quantised weights, and of stages on GPUs.

On GPUs few rows use draftline's kernel, more rows the library's. Weights lie output by output, as
checkpoints have them and as both products read them best. Quantised weights are widened to the
stage's dtype wherever they are multiplied, so that the arithmetic stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from ...core.errors import ConfigError
from ...kernels.cpu.build import vectors
from ...kernels.cpu.packed_linear import (
    PackedWeight,
    pack_quantized,
    packed_linear,
    placed,
)
from ...kernels.dispatch import Machine, load_quantized_linear, runs_triton
from ...kernels.linear.reference import MOST_FEW_ROWS, library_linear
from ...kernels.quantized.kept_weight import KeptWeight, are_alike, joined, keep_weight
from ...kernels.quantized.reference import MOST_QUANTIZED_ROWS
from ..attention.latent import EXPANSION, has_latents
from ..load.quantized_layouts import QuantizedWeight

NONE = "none"
QUANTIZATIONS = (NONE, "int8", "int4", "fp8")


class PackedLinear(nn.Module):
    """A linear layer of a weight that is kept quantised, for any stage but those of CPU kernels."""

    def __init__(self, weight: KeptWeight) -> None:
        """A bias may be set later."""
        super().__init__()
        self.weight = weight
        implementation = "triton" if runs_triton(Machine.of(weight.codes.device)) else "reference"
        self.product = load_quantized_linear(implementation)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., inputs] -> [..., outputs]."""
        rows = x.reshape(-1, x.shape[-1])
        return self.product(rows, self.weight, self.bias).view(*x.shape[:-1], -1)


class QuantizedLinear(nn.Module):
    """A linear layer of a quantised weight, for stages of which the CPU kernels take it over."""

    def __init__(self, weight: QuantizedWeight) -> None:
        """A bias may be set later."""
        super().__init__()
        self.weight = weight
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)


class CpuLinear(nn.Module):
    """A linear layer of a quantised weight by draftline's CPU kernels, which must be loaded, in
    float32; for models that run by transformers' forward, and for heads."""

    def __init__(self, weight: PackedWeight, outputs: int, *, is_rough: bool = False) -> None:
        """A bias may be set later. `is_rough`: as of `packed_linear`."""
        super().__init__()
        self.weight, self.out_features, self.is_rough = weight, outputs, is_rough
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., inputs] -> [..., outputs]."""
        return packed_linear(x, self.weight, self.out_features, self.bias, is_rough=self.is_rough)


def check_quantization(quantization: str) -> None:
    """Raise `ConfigError` for one that is unknown."""
    if quantization not in QUANTIZATIONS:
        known = " or ".join(QUANTIZATIONS)
        raise ConfigError("quantization", f"must be {known}, not {quantization!r}")


def is_quantized(model: nn.Module, name: str) -> bool:
    """Whether a parameter is the weight of a linear layer that is not the head, and is kept.

    Classes derived from it, as some routers are, return more than a product.
    """
    module, _, attribute = name.rpartition(".")
    if attribute != "weight" or "." not in module:
        return False
    parent, _, own = module.rpartition(".")
    if own == EXPANSION and has_latents(model.get_submodule(parent)):
        # Its product with latents is never computed, and rounding would save nothing.
        return False
    return type(model.get_submodule(module)) in (nn.Linear, Conv1D)


# Replaces the layer of which a parameter of this name is the weight.
Put = Callable[[nn.Module, str, QuantizedWeight], None]


def by_output(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """The weight of a layer, stored under this name, as [outputs, inputs]."""
    # GPT-2 has it [inputs, outputs].
    is_turned = isinstance(model.get_submodule(name.removesuffix(".weight")), Conv1D)
    return weight.t().contiguous() if is_turned else weight


def can_keep(model: nn.Module, name: str) -> bool:
    """Whether `Put` applies: `name` is the weight of a linear layer, or of a head."""
    module, _, attribute = name.rpartition(".")
    return attribute == "weight" and type(model.get_submodule(module)) is nn.Linear


def put_for_cpu_kernels(model: nn.Module, name: str, weight: QuantizedWeight) -> None:
    """Replace the layer of which `name` is the weight, by one that the CPU kernels take over."""
    model.set_submodule(name.removesuffix(".weight"), QuantizedLinear(weight))


def put_packed(dtype: torch.dtype) -> Put:
    """Replaces layers by `PackedLinear`; of a weight that the kernels do not know, by a plain one
    in the stage's `dtype`."""

    def put(model: nn.Module, name: str, weight: QuantizedWeight) -> None:
        kept = keep_weight(
            weight.codes, weight.scales, weight.zeros, weight.group_of, weight.minima
        )
        layer = _plain(weight, dtype) if kept is None else PackedLinear(kept)
        model.set_submodule(name.removesuffix(".weight"), layer)

    return put


def put_on_cpu(model: nn.Module, name: str, weight: QuantizedWeight) -> None:
    """Replace the layer of which `name` is the weight by `CpuLinear`; of a weight that the kernels
    do not know, by a plain one in float32."""
    packed = pack_quantized(
        weight.codes, weight.scales, weight.zeros, weight.group_of, vectors(), weight.minima
    )
    outputs = weight.shape[0]
    layer = _plain(weight, torch.float32) if packed is None else CpuLinear(placed(packed), outputs)
    model.set_submodule(name.removesuffix(".weight"), layer)


def _plain(weight: QuantizedWeight, dtype: torch.dtype) -> nn.Linear:
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(weight.dequantized(dtype), requires_grad=False)
    return layer


# `few_rows_linear` of `kernels/linear/`, `quantized_linear` of `kernels/quantized/`.
FewRows = Callable[..., Tensor]
QuantizedProduct = Callable[..., Tensor]
# Largest number of rows for layers without a gate: beyond it, the library's split-k is faster for
# few outputs. Gates and heads use the kernel up to `MOST_FEW_ROWS`, as the library needs another
# launch.
MOST_PLAIN_ROWS = 32


class GpuLinear:
    """A linear layer; `weight` [outputs, inputs]. No `nn.Module`: see `FastLinear`."""

    __slots__ = ("_few_rows", "bias", "weight")

    def __init__(self, few_rows: FewRows, *linears: nn.Linear) -> None:
        """Several layers of the same input become one, their outputs side by side."""
        self._few_rows = few_rows
        self.weight = _stacked([one.weight.detach() for one in linears])
        biases = [one.bias.detach() for one in linears if one.bias is not None]
        self.bias: Tensor | None = _stacked(biases) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [rows, inputs] -> [rows, outputs]."""
        if len(x) <= MOST_PLAIN_ROWS:
            return self._few_rows(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)

    def gated(self, x: Tensor, activation: str) -> Tensor | None:
        """The first half of the outputs, activated, times the second; None: rows are too many."""
        if len(x) > MOST_FEW_ROWS:
            return None
        return self._few_rows(x, self.weight, self.bias, activation=activation)


class GpuPackedLinear:
    """The same of weights that are kept quantised; also a head."""

    __slots__ = ("_out_dtype", "_product", "bias", "row_tile", "weight")

    def __init__(
        self, weight: KeptWeight, bias: Tensor | None, product: QuantizedProduct,
        out_dtype: torch.dtype | None = None, *, row_tile: int | None = None,
    ) -> None:  # fmt: skip
        """`out_dtype`, `row_tile`: as of `quantized_linear`."""
        self.weight, self.bias = weight, bias
        self._product, self._out_dtype, self.row_tile = product, out_dtype, row_tile

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [rows, inputs] -> [rows, outputs]."""
        return self._product(
            x, self.weight, self.bias, out_dtype=self._out_dtype, row_tile=self.row_tile
        )

    def gated(self, x: Tensor, activation: str) -> Tensor | None:
        """The first half of the outputs, activated, times the second; None: rows are too many."""
        if self.row_tile is None and len(x) > MOST_QUANTIZED_ROWS:
            return None
        return self._product(
            x, self.weight, self.bias, activation=activation, row_tile=self.row_tile
        )

    def invariant(self, row_tile: int) -> GpuPackedLinear:
        """The layer of which a row's result depends on no other row."""
        return GpuPackedLinear(
            self.weight, self.bias, self._product, self._out_dtype, row_tile=row_tile
        )

    def of_rows(self, rows: Tensor) -> GpuPackedLinear:
        """These outputs alone, int64 [n], in their order."""
        bias = None if self.bias is None else self.bias[rows].contiguous()
        return GpuPackedLinear(self.weight.of_rows(rows), bias, self._product, self._out_dtype)


Part = TypeVar("Part", bound=Callable[[Tensor], Tensor])


class GpuLinears(Generic[Part]):
    """Several layers of the same input, which differ in how their weights are kept."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [rows, inputs] -> [rows, outputs], side by side."""
        return torch.cat([part(x) for part in self.parts], dim=1)

    def gated(self, x: Tensor, activation: str) -> Tensor | None:  # noqa: ARG002 - as `GpuLinear`
        """None: a gate's halves are in different parts."""
        return None


GpuProduct = GpuLinear | GpuPackedLinear | GpuLinears[GpuLinear | GpuPackedLinear]


class GpuHead:
    """The output head; its logits stay in float32, the dtype of the sums.

    Rounded to 16 bits, every tenth row would have two best tokens.
    """

    __slots__ = ("_few_rows", "bias", "weight")

    def __init__(self, few_rows: FewRows, head: nn.Linear) -> None:
        self._few_rows = few_rows
        self.weight, self.bias = head.weight.detach(), head.bias

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [rows, inputs] -> float32 [rows, vocabulary]."""
        if len(x) <= MOST_FEW_ROWS:
            return self._few_rows(x, self.weight, self.bias, out_dtype=torch.float32)
        return library_linear(x, self.weight, self.bias, out_dtype=torch.float32)

    def of_rows(self, rows: Tensor) -> GpuHead:
        """The head of these rows of the weight, int64 [n], in their order."""
        bias = self.bias is not None
        pruned = nn.Linear(self.weight.shape[1], len(rows), bias=bias, device="meta")
        pruned.weight = nn.Parameter(self.weight[rows].contiguous(), requires_grad=False)
        if self.bias is not None:
            pruned.bias = nn.Parameter(self.bias[rows].contiguous(), requires_grad=False)
        return GpuHead(self._few_rows, pruned)


def gpu_linear(few_rows: FewRows, *linears: nn.Linear | PackedLinear) -> GpuProduct:
    """One layer of several of the same input."""
    runs: list[list[nn.Linear | PackedLinear]] = []
    for one in linears:
        if runs and _are_joined(runs[-1][0], one):
            runs[-1].append(one)
        else:
            runs.append([one])
    parts = [_gpu_part(few_rows, run) for run in runs]
    return parts[0] if len(parts) == 1 else GpuLinears(parts)


def _are_joined(one: nn.Linear | PackedLinear, other: nn.Linear | PackedLinear) -> bool:
    if isinstance(one, PackedLinear) and isinstance(other, PackedLinear):
        return are_alike(one.weight, other.weight) and (one.bias is None) == (other.bias is None)
    return isinstance(one, nn.Linear) and isinstance(other, nn.Linear)


def _gpu_part(
    few_rows: FewRows, linears: Sequence[nn.Linear | PackedLinear]
) -> GpuLinear | GpuPackedLinear:
    packed = [one for one in linears if isinstance(one, PackedLinear)]
    if not packed:
        return GpuLinear(few_rows, *(one for one in linears if isinstance(one, nn.Linear)))
    biases = [one.bias.detach() for one in packed if one.bias is not None]
    weight = packed[0].weight if len(packed) == 1 else joined([one.weight for one in packed])
    return GpuPackedLinear(weight, _stacked(biases) if biases else None, packed[0].product)


def gpu_head(few_rows: FewRows, head: nn.Linear | PackedLinear) -> GpuHead | GpuPackedLinear:
    """The output head, quantised or not."""
    if isinstance(head, PackedLinear):
        return GpuPackedLinear(head.weight, head.bias, head.product, torch.float32)
    return GpuHead(few_rows, head)


def sum_exactly() -> None:
    """Make the library accumulate 16-bit products in float32, for the whole process."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


def _stacked(tensors: list[Tensor]) -> Tensor:
    # A single weight is not copied: a head's weight may be the embedding's.
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
