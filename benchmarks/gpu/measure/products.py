"""The largest product of a layer alone, with weights of 16 bits and of 8."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from ....kernels.int8.reference import int8_linear
from ....models.layers.int8_linear import Int8Linear
from ..findings import Findings
from ..floors import Work
from ..setting import DTYPE, Setting
from .attention import relative_error

GROUP = "products of a layer"
SPREAD = 0.02
# Results are rounded to bfloat16, and sums are added up in another order.
MOST_ERROR = 0.02


@dataclass(frozen=True, slots=True)
class Products:
    """One matrix, as it is and rounded."""

    weight: Tensor
    rounded: Int8Linear

    def measure(self, rows: int, setting: Setting, findings: Findings) -> None:
        """Both products of `rows` rows."""
        outputs, inputs = self.weight.shape
        x = torch.randn(rows, inputs, dtype=DTYPE, device=setting.device)
        runs: dict[str, tuple[Callable[[], Tensor], int]] = {
            "bfloat16": (lambda: linear(x, self.weight), self.weight.nbytes),
            "int8": (lambda: self.rounded(x), self.rounded.weight.nbytes),
        }
        plain = None
        for kind, (run, num_bytes) in runs.items():
            times = setting.clock.on_device(run)
            note = f"{statistics.median(times) / plain:.2f} x bfloat16" if plain else ""
            plain = plain or statistics.median(times)
            work = Work(num_bytes, 2 * rows * outputs * inputs)
            findings.add(GROUP, figure_name(rows, inputs, outputs, kind), times, work, note=note)
        wanted = int8_linear(x, self.rounded.weight, self.rounded.scales)
        error = relative_error(self.rounded(x), wanted)
        if not error < MOST_ERROR:
            findings.fail(f"{GROUP}, {rows} rows", f"int8 differs from torch's by {error:.1e}")


def measure_products(setting: Setting, findings: Findings) -> None:
    """Time the product of gate and up together, for one token and for a tree."""
    plan = setting.plan
    sizes = plan.whole.options
    shape = (2 * sizes["intermediate_size"], sizes["hidden_size"])
    weight = torch.randn(shape, dtype=DTYPE, device=setting.device) * SPREAD
    products = Products(weight, Int8Linear(weight))
    for case in (plan.one_token, plan.tree):
        what = f"{GROUP}, {case.rows_each} rows"
        findings.attempt(what, partial(products.measure, case.rows_each, setting, findings))


def figure_name(rows: int, inputs: int, outputs: int, kind: str) -> str:
    """What a figure is called."""
    return f"{rows} x {inputs} x {outputs}, {kind}"
