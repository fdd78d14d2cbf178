"""The largest product of a layer alone: as stages do it, by a library, with weights of 8 bits."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ....kernels.dispatch import (
    Machine,
    load_few_rows_linear,
    load_invariant_linear,
    runs_triton,
)
from ....kernels.int8.reference import int8_linear
from ....models.layers.linear_layers import GpuLinear, Int8Linear
from ..findings import Findings
from ..floors import StepTraffic
from ..setting import DTYPE, GpuSetting
from .attention import relative_error

GROUP = "products of a layer"
SPREAD = 0.02
FEW_ROWS = 8
# Results are rounded to bfloat16, and sums are added up in another order.
MOST_ERROR = 0.02


@dataclass(frozen=True, slots=True)
class Products:
    """One matrix, as it is and rounded.

    of_stage   what a stage runs: draftline's own product of few rows, and the library's of more
    one_order  the product of `batch_invariant: on`
    """

    weight: Tensor
    of_stage: GpuLinear
    rounded: Int8Linear
    one_order: Callable[[Tensor, Tensor], Tensor]

    def measure(self, rows: int, setting: GpuSetting, findings: Findings) -> None:
        """All products of `rows` rows."""
        outputs, inputs = self.weight.shape
        x = torch.randn(rows, inputs, dtype=DTYPE, device=setting.device)
        runs: dict[str, tuple[Callable[[], Tensor], int]] = {
            "bfloat16": (lambda: linear(x, self.weight), self.weight.nbytes),
            "of a stage": (lambda: self.of_stage(x), self.weight.nbytes),
            "one order": (lambda: self.one_order(x, self.weight.t()), self.weight.nbytes),
            "int8": (lambda: self.rounded(x), self.rounded.weight.nbytes),
        }
        plain = None
        for kind, (run, num_bytes) in runs.items():
            times = setting.clock.on_device(run)
            note = f"{statistics.median(times) / plain:.2f} x bfloat16" if plain else ""
            plain = plain or statistics.median(times)
            work = StepTraffic(num_bytes, 2 * rows * outputs * inputs)
            findings.add(GROUP, figure_name(rows, inputs, outputs, kind), times, work, note=note)
        wanted = {
            "of a stage": linear(x, self.weight),
            "one order": linear(x, self.weight),
            "int8": int8_linear(x, self.rounded.weight, self.rounded.scales),
        }
        for kind, result in wanted.items():
            error = relative_error(runs[kind][0](), result)
            if not error < MOST_ERROR:
                what = f"{kind} differs from torch's by {error:.1e}"
                findings.fail(f"{GROUP}, {rows} rows", what)


def measure_products(setting: GpuSetting, findings: Findings) -> None:
    """Time the product of gate and up together, for one token, a few and a tree."""
    plan = setting.plan
    sizes = plan.whole.options
    shape = (2 * sizes["intermediate_size"], sizes["hidden_size"])
    weight = torch.randn(shape, dtype=DTYPE, device=setting.device) * SPREAD
    implementation = "triton" if runs_triton(Machine.of(setting.device)) else "reference"
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    products = Products(
        weight, GpuLinear(load_few_rows_linear(implementation), layer), Int8Linear(weight),
        load_invariant_linear(implementation),
    )  # fmt: skip
    for rows in (plan.one_token.rows_each, FEW_ROWS, plan.tree.rows_each):
        what = f"{GROUP}, {rows} rows"
        findings.attempt(what, partial(products.measure, rows, setting, findings))


def figure_name(rows: int, inputs: int, outputs: int, kind: str) -> str:
    """What a figure is called."""
    return f"{rows} x {inputs} x {outputs}, {kind}"
