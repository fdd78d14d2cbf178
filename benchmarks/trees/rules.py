"""Acceptance rules on trees of draws beside `coupled`, at equal nodes.

    python -m draftline.benchmarks.trees.rules

The demo's small model drafts the same static tree: of most probable tokens, or of draws with and
without replacement. Every rule but `typical` keeps the target's distribution; what differs is how
much is accepted.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ...deploy.cli.bench.job import BenchJob
from ...deploy.ray_serve.runtime import quiet_libraries
from ...drafters.tree_shape import shape_of_widths
from ...measure.records.record import machine
from .rows import Case, fields, measured, show

RESULTS = Path(__file__).parents[1] / "results" / "tree_rules.json"
REFERENCE = "coupled, most probable"
# Name -> acceptance rule, and the tree's draws.
CASES = {
    REFERENCE: ("coupled", "none"),
    "rejection, most probable": ("rejection", "none"),
    "rejection, without replacement": ("rejection", "without_replacement"),
    "rejection, with replacement": ("rejection", "with_replacement"),
    "traversal, without replacement": ("traversal", "without_replacement"),
    "k_seq, with replacement": ("k_seq", "with_replacement"),
}


def main(
    *,
    widths: Annotated[str, typer.Option(help="Children of a node, level by level.")] = "3,2,1,1",
    temperatures: Annotated[str, typer.Option(help="Temperatures.")] = "0.3,0.7,1",
    num_prompts: Annotated[int, typer.Option(help="Bundled prompts.")] = 66,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 96,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Measure, print, write."""
    quiet_libraries()
    console = Console(width=110, highlight=False)
    shape = [int(width) for width in widths.split(",")]
    nodes = len(shape_of_widths(shape))
    content: dict[str, Any] = {
        "machine": machine().fields(), "widths": shape, "nodes": nodes, "num_prompts": num_prompts,
        "max_tokens": max_tokens, "reference": REFERENCE, "temperatures": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree.json"
        tree.write_text(json.dumps({"widths": shape}), encoding="utf-8")
        cases = [
            Case(
                name,
                {
                    "tree": str(tree), "draws": draws, "num_tokens": len(shape),
                    "max_nodes": nodes, "distribution_size": 64,
                },
                {"acceptance": rule, "node_budget": "full", "tree_nodes": nodes},
            )
            for name, (rule, draws) in CASES.items()
        ]  # fmt: skip
        for temperature in map(float, temperatures.split(",")):
            job = BenchJob(
                num_prompts=num_prompts, max_tokens=max_tokens, temperature=temperature, rounds=1,
                warm_up=False, concurrency=8,
            )  # fmt: skip
            rows = fields(measured(job, cases, console), REFERENCE)
            show(rows, f"temperature {temperature:g}, {nodes} nodes", "coupled", console)
            content["temperatures"][f"{temperature:g}"] = rows
            output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    console.print(machine().line())


if __name__ == "__main__":
    typer.run(main)
