"""Products of the CPU kernels with integer weights: by dot products of bytes, beside widened codes.

    python -m draftline.benchmarks.step.products

Milliseconds of one thread's CPU time, of a matrix of 4,096 inputs and 14,336 outputs in groups of
32, which no cache holds: 4 bits with minima as of `Q4_1`, 8 bits as of `Q8_0`. The error is the
root of the mean square against float64, of normal inputs.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ...kernels.cpu.build import load_cpu_ops, vectors
from ...kernels.cpu.packed_linear import PackedWeight, pack_quantized, packed_linear, placed
from ...models.load.quantized_layouts import QuantizedWeight, groups_in_order
from ...models.stage.options import StageOptions

INPUTS, OUTPUTS, GROUP = 4096, 14336, 32
KINDS = {"Q4_1": torch.uint8, "Q8_0": torch.int8}
ROWS = 1, 2, 4, 8, 16, 33, 64
ROUNDS = 9
# Outputs whose error is computed.
CHECKED = 512


def main(
    results: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    load_cpu_ops(Path(StageOptions().compile_cache).expanduser())
    table = Table("weights", "rows", "widened, ms", "dots, ms", "widened / dots", "error / widened")
    found = []
    for kind in KINDS:
        weight = _weight(kind)
        forms = [_packed(weight, has_byte_dots=dots) for dots in (False, True)]
        for rows in ROWS:
            torch.manual_seed(rows)
            x = torch.randn(rows, INPUTS)
            widened, dots = _best(x, forms)
            error = _error(x, forms[1], weight) / _error(x, forms[0], weight)
            found.append({
                "weights": kind, "rows": rows, "widened_ms": widened, "dots_ms": dots,
                "error": error,
            })  # fmt: skip
            table.add_row(
                kind, str(rows), f"{widened:.2f}", f"{dots:.2f}", f"{widened / dots:.2f}",
                f"{error:.2f}",
            )  # fmt: skip
    Console(width=110, highlight=False).print(table)
    if results is not None:
        results.write_text(json.dumps(found, indent=1) + "\n")


def _weight(kind: str) -> QuantizedWeight:
    """A random one, whose scales and minima have 16 bits."""
    torch.manual_seed(0)
    first, last = (0, 16) if kind == "Q4_1" else (-127, 128)
    codes = torch.randint(first, last, (OUTPUTS, INPUTS), dtype=KINDS[kind])
    scales = torch.rand(OUTPUTS, INPUTS // GROUP).half().float() / 64
    minima = -8 * scales if kind == "Q4_1" else None
    return QuantizedWeight(codes, scales, None, groups_in_order(INPUTS, GROUP, codes), minima)


def _packed(weight: QuantizedWeight, *, has_byte_dots: bool) -> PackedWeight:
    packed = pack_quantized(
        weight.codes, weight.scales, weight.zeros, weight.group_of,
        replace(vectors(), has_byte_dots=has_byte_dots), weight.minima,
    )  # fmt: skip
    assert packed is not None
    return placed(packed)


def _best(x: Tensor, forms: list[PackedWeight]) -> list[float]:
    """Milliseconds of each form's fastest round, in turn."""
    best = [float("inf")] * len(forms)
    for _ in range(ROUNDS):
        for index, form in enumerate(forms):
            begin = time.thread_time()
            packed_linear(x, form, OUTPUTS)
            best[index] = min(best[index], time.thread_time() - begin)
    return [1e3 * seconds for seconds in best]


def _error(x: Tensor, form: PackedWeight, weight: QuantizedWeight) -> float:
    by_input = torch.arange(INPUTS) // GROUP
    values = weight.codes[:CHECKED].double() * weight.scales[:CHECKED, by_input].double()
    if weight.minima is not None:
        values += weight.minima[:CHECKED, by_input].double()
    exact = x.double() @ values.t()
    return float((packed_linear(x, form, OUTPUTS)[:, :CHECKED] - exact).square().mean().sqrt())


if __name__ == "__main__":
    typer.run(main)
