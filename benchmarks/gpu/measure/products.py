"""The largest product of a layer alone: as stages do it, by a library, with quantised weights."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ....kernels.dispatch import (
    Machine,
    load_few_rows_linear,
    load_invariant_linear,
    load_quantized_linear,
    runs_triton,
)
from ....kernels.quantized.kept_weight import KeptWeight, keep_weight
from ....models.layers.linear_layers import GpuLinear, GpuPackedLinear
from ..findings import Findings
from ..floors import StepTraffic
from ..setting import DTYPE, GpuSetting
from .attention import relative_error

GROUP = "products of a layer"
SPREAD = 0.02
# One of each tile of rows, and the smallest that the library multiplies.
ROWS = (1, 8, 33, 65, 129)
# Inputs that share a scale in most checkpoints.
GROUP_SIZE = 128
# Results are rounded to bfloat16, and sums are added up in another order.
MOST_ERROR = 0.02


@dataclass(frozen=True, slots=True)
class Products:
    """One matrix, as it is and quantised.

    of_stage   what a stage runs: draftline's own product of few rows, and the library's of more
    one_order  the product of `batch_invariant: on`
    quantized  the same of other matrices, by what they are kept as
    """

    weight: Tensor
    of_stage: GpuLinear
    one_order: Callable[[Tensor, Tensor], Tensor]
    quantized: Mapping[str, GpuPackedLinear]

    def measure(self, rows: int, setting: GpuSetting, findings: Findings) -> None:
        """All products of `rows` rows."""
        outputs, inputs = self.weight.shape
        x = torch.randn(rows, inputs, dtype=DTYPE, device=setting.device)
        runs: dict[str, tuple[Callable[[], Tensor], int]] = {
            "bfloat16": (lambda: linear(x, self.weight), self.weight.nbytes),
            "of a stage": (lambda: self.of_stage(x), self.weight.nbytes),
            "one order": (lambda: self.one_order(x, self.weight.t()), self.weight.nbytes),
        }
        wanted = dict.fromkeys(runs, linear(x, self.weight))
        for kind, product in self.quantized.items():
            runs[kind] = partial(product, x), product.weight.num_bytes
            wanted[kind] = linear(x, product.weight.dequantized(DTYPE))
        plain = None
        for kind, (run, num_bytes) in runs.items():
            times = setting.clock.on_device(run)
            note = f"{statistics.median(times) / plain:.2f} x bfloat16" if plain else ""
            plain = plain or statistics.median(times)
            work = StepTraffic(num_bytes, 2 * rows * outputs * inputs)
            findings.add(GROUP, figure_name(rows, inputs, outputs, kind), times, work, note=note)
            error = relative_error(run(), wanted[kind])
            if not error < MOST_ERROR:
                what = f"{kind} differs from torch's by {error:.1e}"
                findings.fail(f"{GROUP}, {rows} rows", what)


def measure_products(setting: GpuSetting, findings: Findings) -> None:
    """Time the product of gate and up together."""
    sizes = setting.plan.whole.options
    shape = (2 * sizes["intermediate_size"], sizes["hidden_size"])
    weight = torch.randn(shape, dtype=DTYPE, device=setting.device) * SPREAD
    implementation = "triton" if runs_triton(Machine.of(setting.device)) else "reference"
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    product = load_quantized_linear(implementation)
    products = Products(
        weight, GpuLinear(load_few_rows_linear(implementation), layer),
        load_invariant_linear(implementation),
        {kind: GpuPackedLinear(of(weight), None, product) for kind, of in QUANTIZED.items()},
    )  # fmt: skip
    for rows in ROWS:
        what = f"{GROUP}, {rows} rows"
        findings.attempt(what, partial(products.measure, rows, setting, findings))


def figure_name(rows: int, inputs: int, outputs: int, kind: str) -> str:
    """What a figure is called."""
    return f"{rows} x {inputs} x {outputs}, {kind}"


def _int8(weight: Tensor) -> KeptWeight:
    """A scale for each output."""
    scales = weight.float().abs().amax(dim=1, keepdim=True) / 127
    return _kept((weight / scales).round().to(torch.int8), scales, None, weight.shape[1])


def _fp8(weight: Tensor) -> KeptWeight:
    """A scale for each block of 128 inputs, of as many outputs as one has."""
    scales = torch.full_like(weight[:, ::GROUP_SIZE], SPREAD, dtype=torch.float32)
    return _kept((weight / SPREAD).to(torch.float8_e4m3fn), scales, None, GROUP_SIZE)


def _uint4(weight: Tensor) -> KeptWeight:
    """A scale and a zero point for each group."""
    scales = torch.full_like(weight[:, ::GROUP_SIZE], SPREAD / 2, dtype=torch.float32)
    zeros = torch.arange(scales.numel(), device=weight.device).view(scales.shape) % 4 + 6.0
    codes = (weight / (SPREAD / 2) + 8).round().clamp(0, 15)
    return _kept(codes.to(torch.uint8), scales, zeros, GROUP_SIZE)


QUANTIZED = {"int8": _int8, "fp8": _fp8, "4 bits": _uint4}


def _kept(codes: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int) -> KeptWeight:
    group_of = torch.arange(codes.shape[1], device=codes.device) // group_size
    found = keep_weight(codes, scales, zeros, group_of)
    assert found is not None
    return found
