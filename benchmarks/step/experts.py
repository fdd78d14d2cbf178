"""One layer of experts over the rows of a step: transformers' grouped product beside its loop.

    python -m draftline.benchmarks.step.experts [--experts 64] [--active 8] [--threads 1]

Stages run the grouped product, which is transformers' own default. Processor time, the least of
several turns; random weights in float32.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ...measure.records.record import machine

RESULTS = Path(__file__).parents[1] / "results" / "experts.json"
LOOP, GROUPED = "eager", "grouped_mm"
ROWS = (1, 4, 16, 64)
TURNS = 12


def make_layer(implementation: str, experts: int, active: int, hidden: int, width: int) -> Any:
    """The experts and the router of one layer of Qwen3-MoE."""
    config = AutoConfig.for_model(
        "qwen3_moe", num_hidden_layers=1, vocab_size=64, num_attention_heads=4,
        num_key_value_heads=4, hidden_size=hidden, intermediate_size=hidden,
        moe_intermediate_size=width, num_experts=experts, num_experts_per_tok=active,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
    for weight in model.parameters():
        weight.data.normal_(0, 0.05)
    return model.float().eval().model.layers[0].mlp


@torch.inference_mode()
def measure(layers: dict[str, Any], hidden: int) -> list[dict[str, float]]:
    """Milliseconds of each implementation by rows, and how far the results differ."""
    found = []
    for rows in ROWS:
        states = torch.randn(1, rows, hidden)
        seconds: dict[str, list[float]] = {name: [] for name in layers}
        results: dict[str, Tensor] = {}
        for _ in range(TURNS):
            for name, layer in layers.items():
                begin = time.process_time()
                out = layer(states)
                seconds[name].append(time.process_time() - begin)
                results[name] = out[0] if isinstance(out, tuple) else out
        difference = float((results[LOOP] - results[GROUPED]).abs().max())
        least = {name: 1e3 * min(own) for name, own in seconds.items()}
        found.append({"rows": rows, **least, "difference": difference})
    return found


def main(
    *,
    experts: Annotated[int, typer.Option(help="Of the layer.")] = 64,
    active: Annotated[int, typer.Option(help="Experts of a row.")] = 8,
    hidden: Annotated[int, typer.Option(help="Width of the states.")] = 512,
    width: Annotated[int, typer.Option(help="Width of an expert.")] = 192,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Measure a layer of experts."""
    torch.set_num_threads(threads)
    layers = {name: make_layer(name, experts, active, hidden, width) for name in (LOOP, GROUPED)}
    rows = measure(layers, hidden)
    table = Table("rows", "loop, ms", "grouped, ms", "loop / grouped", box=None)
    for row in rows:
        ratio = row[LOOP] / row[GROUPED]
        table.add_row(
            f"{row['rows']:.0f}", f"{row[LOOP]:.2f}", f"{row[GROUPED]:.2f}", f"{ratio:.2f}"
        )
    console = Console()
    console.print(table, machine().line())
    sizes = {"experts": experts, "active": active, "hidden": hidden, "width": width}
    content = {"machine": machine().fields(), "threads": threads, **sizes, "rows": rows}
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
