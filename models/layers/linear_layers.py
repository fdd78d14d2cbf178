"""Linear layers that are not torch's: of weights in 8 bits, of heads on CPUs, of stages on GPUs.

On GPUs few rows use draftline's kernel, more rows the library's. Weights lie output by output, as
checkpoints have them and as both products read them best. Of weights in 8 bits only the weights are
rounded, to 127 steps with one scale for each output; the arithmetic stays the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from ...core.errors import ConfigError
from ...kernels.cpu.build import are_loaded, vectors
from ...kernels.cpu.packed_linear import PackedWeight, pack_weights, packed_linear
from ...kernels.dispatch import Machine, load_int8_linear, runs_triton
from ...kernels.int8.reference import MOST_INT8_ROWS
from ...kernels.linear.reference import MOST_FEW_ROWS
from ..load.quantized_layouts import QuantizedWeight
from ..load.rounding import rounded

NONE = "none"
QUANTIZATIONS = (NONE, "int8", "int4", "fp8")
# Those that only the CPU kernels multiply by.
OF_CPU_KERNELS = ("int4", "fp8")
LARGEST = 127


class Int8Linear(nn.Module):
    """weight int8 [outputs, inputs], scales float32 [outputs], bias as of the layer it replaces."""

    def __init__(self, weight: Tensor) -> None:
        """`weight` of a linear layer without a bias, which may be set later."""
        super().__init__()
        codes, scales = _rounded_rows(weight)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        implementation = "triton" if runs_triton(Machine.of(weight.device)) else "reference"
        self.product = load_int8_linear(implementation)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., inputs] -> [..., outputs]."""
        rows = x.reshape(-1, x.shape[-1])
        return self.product(rows, self.weight, self.scales, self.bias).view(*x.shape[:-1], -1)


def _rounded_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [outputs, inputs] and float32 scales [outputs]."""
    scales = weight.abs().amax(dim=1).float().clamp(min=torch.finfo(torch.float32).tiny)
    scales /= LARGEST
    return (weight.float() / scales[:, None]).round().to(torch.int8), scales


class QuantizedLinear(nn.Module):
    """A linear layer of a quantised weight, for stages of which the CPU kernels take it over."""

    def __init__(self, weight: QuantizedWeight) -> None:
        """A bias may be set later."""
        super().__init__()
        self.weight = weight
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)


def check_quantization(quantization: str, *, keep: bool) -> None:
    """Raise `ConfigError` for one that is unknown, or is of the CPU kernels where they do not take
    the weights over (`keep`)."""
    if quantization not in QUANTIZATIONS:
        known = " or ".join(QUANTIZATIONS)
        raise ConfigError("quantization", f"must be {known}, not {quantization!r}")
    if quantization in OF_CPU_KERNELS and not keep:
        raise ConfigError(
            "quantization", f"{quantization} is of float32 stages on CPUs; use int8 or none here"
        )


def is_quantized(model: nn.Module, name: str) -> bool:
    """Whether a parameter is the weight of a linear layer that is not the head."""
    module, _, attribute = name.rpartition(".")
    if attribute != "weight" or "." not in module:
        return False
    return isinstance(model.get_submodule(module), nn.Linear | Conv1D)


def put_quantized(
    model: nn.Module, name: str, weight: Tensor, quantization: str, *, keep: bool = False
) -> None:
    """Replace the layer of which `name` is the weight, by one of rounded weights. `keep`: see
    `put_kept`.

    Raises `ValueError` for a weight that is not finite.
    """
    parent, _, child = name.removesuffix(".weight").rpartition(".")
    owner = model.get_submodule(parent)
    # GPT-2 has it [inputs, outputs].
    is_turned = isinstance(getattr(owner, child), Conv1D)
    own = weight.t().contiguous() if is_turned else weight
    if keep:
        put_kept(model, name, rounded(own, quantization))
    else:
        setattr(owner, child, Int8Linear(own))


def can_keep(model: nn.Module, name: str) -> bool:
    """Whether `put_kept` applies: `name` is the weight of a linear layer, or of a head."""
    module, _, attribute = name.rpartition(".")
    return attribute == "weight" and type(model.get_submodule(module)) is nn.Linear


def put_kept(model: nn.Module, name: str, weight: QuantizedWeight) -> None:
    """Replace the layer of which `name` is the weight, by one that the CPU kernels take over."""
    model.set_submodule(name.removesuffix(".weight"), QuantizedLinear(weight))


def pack_linears(module: nn.Module) -> None:
    """Give float32 linear layers on a CPU the product of draftline's kernels, if this process has
    loaded them.

    Of the few rows that a level of a draft has, torch's product takes up to four times as long. The
    layers keep their types; their weights become [panels, inputs, panel] (`pack_weights`).
    """
    if not are_loaded():
        return
    panel = vectors().panel
    for layer in module.modules():
        if not isinstance(layer, nn.Linear) or layer.weight.dtype != torch.float32:
            continue
        if layer.weight.device.type != "cpu":
            continue
        packed = pack_weights([layer.weight.detach().t()], panel)
        layer.weight = nn.Parameter(packed.codes, requires_grad=False)
        product = partial(_packed_product, layer)
        layer.forward = product  # pyright: ignore[reportAttributeAccessIssue]


def _packed_product(layer: nn.Linear, x: Tensor) -> Tensor:
    """`x` [..., inputs] -> [..., outputs] of a layer whose weight is packed."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = packed_linear(rows, PackedWeight(layer.weight), layer.out_features)
    if layer.bias is not None:
        out += layer.bias
    return out.view(*x.shape[:-1], layer.out_features)


# `few_rows_linear` of `kernels/linear/`.
FewRows = Callable[..., Tensor]
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


class GpuInt8Linear:
    """The same of weights that are kept in 8 bits."""

    __slots__ = ("_product", "bias", "scales", "weight")

    def __init__(self, *linears: Int8Linear) -> None:
        """Several layers of the same input become one, their outputs side by side."""
        self._product = linears[0].product
        self.weight = _stacked([one.weight.detach() for one in linears])
        self.scales = _stacked([one.scales.detach() for one in linears])
        biases = [one.bias.detach() for one in linears if one.bias is not None]
        self.bias: Tensor | None = _stacked(biases) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [rows, inputs] -> [rows, outputs]."""
        return self._product(x, self.weight, self.scales, self.bias)

    def gated(self, x: Tensor, activation: str) -> Tensor | None:
        """The first half of the outputs, activated, times the second; None: rows are too many."""
        if len(x) > MOST_INT8_ROWS:
            return None
        return self._product(x, self.weight, self.scales, self.bias, activation=activation)


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
        if x.is_cuda and x.dtype != torch.float32:
            logits = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        else:
            logits = linear(x.float(), self.weight.float())
        return logits if self.bias is None else logits.add_(self.bias)

    def of_rows(self, rows: Tensor) -> GpuHead:
        """The head of these rows of the weight, int64 [n], in their order."""
        bias = self.bias is not None
        pruned = nn.Linear(self.weight.shape[1], len(rows), bias=bias, device="meta")
        pruned.weight = nn.Parameter(self.weight[rows].contiguous(), requires_grad=False)
        if self.bias is not None:
            pruned.bias = nn.Parameter(self.bias[rows].contiguous(), requires_grad=False)
        return GpuHead(self._few_rows, pruned)


def gpu_linear(few_rows: FewRows, *linears: nn.Linear | Int8Linear) -> GpuLinear | GpuInt8Linear:
    """One layer of several of the same input, all of one kind."""
    if isinstance(linears[0], Int8Linear):
        return GpuInt8Linear(*linears)  # pyright: ignore[reportArgumentType] - of one kind
    return GpuLinear(few_rows, *linears)  # pyright: ignore[reportArgumentType] - of one kind


def sum_exactly() -> None:
    """Make the library accumulate 16-bit products in float32, for the whole process."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


def _stacked(tensors: list[Tensor]) -> Tensor:
    # A single weight is not copied: a head's weight may be the embedding's.
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
