"""The experts of a mixture's layer: transformers' own, and draftline's with weights of fewer bits.

    python -m draftline.benchmarks.step.experts

Milliseconds of one thread's CPU time, and MiB of the weights, of the experts of one layer of
Qwen3-30B-A3B (128, of which each row takes 8) and of gpt-oss-20b (32, of which each takes 4).
Numbers and routes are random. transformers' experts are in float32, by its own choice of a product.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ...kernels.cpu.build import load_cpu_ops
from ...kernels.small_codes import E2M1_NUMBERS
from ...models.layers.experts import CpuExperts, gate_of
from ...models.layers.weight_memory import held_bytes
from ...models.load.expert_weights import ExpertPart
from ...models.load.quantized_layouts import QuantizedWeight, groups_in_order
from ...models.load.rounding import rounded
from ...models.stage.options import StageOptions

ROWS, ROUNDS, MXFP4_GROUP = (1, 8, 32), 5, 32
# Of each the class of its experts, its config, and the experts that a row takes.
LAYERS: dict[str, tuple[Any, Any, int]] = {
    "Qwen3-30B-A3B": (
        Qwen3MoeExperts,
        AutoConfig.for_model(
            "qwen3_moe", hidden_size=2048, num_experts=128, moe_intermediate_size=768
        ),
        8,
    ),
    "gpt-oss-20b": (
        GptOssExperts,
        AutoConfig.for_model(
            "gpt_oss", hidden_size=2880, num_local_experts=32, intermediate_size=2880
        ),
        4,
    ),
}
# How a matrix of an expert is kept.
Keep = Callable[[Tensor], ExpertPart]


def main(
    results: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    layer: Annotated[list[str] | None, typer.Option(help="Of these models alone.")] = None,
) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    load_cpu_ops(Path(StageOptions().compile_cache).expanduser())
    table = Table("layer", "weights", "MiB", *(f"{rows} rows, ms" for rows in ROWS), box=None)
    found = [row for name in layer or LAYERS for row in measured(name)]
    for row in found:
        times = (f"{ms:.1f}" for ms in row["milliseconds"].values())
        table.add_row(row["layer"], row["weights"], f"{row['mib']:.0f}", *times)
    Console(width=100, highlight=False).print(table)
    if results is not None:
        results.write_text(json.dumps(found, indent=1) + "\n")


@torch.inference_mode()
def measured(name: str) -> Iterator[dict[str, Any]]:
    """The figures of a layer, one way of keeping its weights after the other."""
    kind, config, choices = LAYERS[name]
    torch.manual_seed(0)
    like: Any = kind(config).eval()
    config._experts_implementation = "grouped_mm"  # noqa: SLF001 - as transformers chooses it
    small = "4 bits, groups of 128" if kind is Qwen3MoeExperts else "MXFP4"
    keeps: dict[str, Keep] = {
        "bfloat16": lambda weight: weight,
        "int8": lambda weight: rounded(weight, "int8"),
        small: (lambda weight: rounded(weight, "int4")) if "4 bits" in small else mxfp4,
    }
    for parameter in like.parameters():
        parameter.copy_((torch.randn(parameter.shape) / 50).bfloat16())
    routes = [
        torch.stack([torch.randperm(like.num_experts)[:choices] for _ in range(max(ROWS))])
        for _ in range(ROUNDS)
    ]
    size = sum(parameter.nbytes for parameter in like.parameters())
    yield _row(name, "transformers, float32", size, like, routes)
    for title, keep in keeps.items():
        experts = _kept(like, keep)
        yield _row(name, title, held_bytes(experts), experts, routes)


def mxfp4(weight: Tensor) -> QuantizedWeight:
    """A weight of its size and random numbers: what a product takes does not depend on them."""
    codes = E2M1_NUMBERS[torch.randint(16, weight.shape)].to(torch.float8_e4m3fn)
    scales = torch.full((len(weight), weight.shape[1] // MXFP4_GROUP), 2.0**-8)
    groups = groups_in_order(weight.shape[1], MXFP4_GROUP, codes)
    return QuantizedWeight(codes, scales, None, groups)


def _kept(like: Any, keep: Keep) -> CpuExperts:
    gate = gate_of(like)
    assert gate is not None
    experts = CpuExperts(like, gate)
    for name, parameter in like.named_parameters():
        if name.endswith("_bias"):
            setattr(experts, name, parameter)
            continue
        matrices = parameter.transpose(1, 2) if like.is_transposed else parameter

        def read(matrices: Tensor = matrices) -> Iterator[Sequence[ExpertPart]]:
            return ([keep(one)] for one in matrices)

        experts.put(name, read)
    return experts


def _row(
    layer: str, weights: str, size: int, experts: Any, routes: Sequence[Tensor]
) -> dict[str, Any]:
    times = {}
    for rows in ROWS:
        x, shares = torch.randn(rows, 2880)[:, : _hidden(layer)].contiguous(), torch.rand(rows, 32)
        best = float("inf")
        for chosen in (route[:rows].contiguous() for route in routes):
            begin = time.thread_time()
            experts(x, chosen, shares[:, : chosen.shape[1]].contiguous())
            best = min(best, time.thread_time() - begin)
        times[rows] = 1e3 * best
    return {"layer": layer, "weights": weights, "mib": size / 2**20, "milliseconds": times}


def _hidden(layer: str) -> int:
    return LAYERS[layer][1].hidden_size


if __name__ == "__main__":
    typer.run(main)
