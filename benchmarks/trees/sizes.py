"""Sequoia's trees beside EAGLE-2's dynamic ones and the engine's own budget, by number of nodes.

    python -m draftline.benchmarks.trees.sizes

The demo's small model drafts. `dynamic` and `sequoia` trees have all the nodes; the `fastest` of
Sequoia's have as many of them, and as many levels, as bring most tokens a second. These are
verified whole; of what is `adaptive` the engine buys the nodes that are worth their time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ...deploy.cli.bench.job import BenchJob
from ...deploy.ray_serve.runtime import quiet_libraries
from ...measure.records.record import machine
from .rows import Case, fields, measured, show

RESULTS = Path(__file__).parents[1] / "results" / "tree_sizes.json"
REFERENCE = "dynamic"
# Children of a node and width of a level of the dynamic tree.
TOP_K = 8


def main(
    *,
    nodes: Annotated[str, typer.Option(help="Most nodes of a tree.")] = "8,16,32,64,128",
    depth: Annotated[int, typer.Option(help="Most levels.")] = 6,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    num_prompts: Annotated[int, typer.Option(help="Bundled prompts.")] = 33,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 96,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Measure, print, write."""
    quiet_libraries()
    console = Console(width=110, highlight=False)
    job = BenchJob(
        num_prompts=num_prompts, max_tokens=max_tokens, temperature=temperature, rounds=1
    )
    content: dict[str, Any] = {
        "machine": machine().fields(), "depth": depth, "temperature": temperature,
        "num_prompts": num_prompts, "max_tokens": max_tokens, "reference": REFERENCE, "nodes": {},
    }  # fmt: skip
    for count in map(int, nodes.split(",")):
        options = {"num_tokens": depth, "max_nodes": count}
        dynamic = options | {"tree": "dynamic", "top_k": TOP_K}
        sequoia = options | {"tree": "sequoia", "tree_size": "full"}
        bought = {"tree_nodes": count}
        whole = bought | {"node_budget": "full"}
        cases = [
            Case(REFERENCE, dynamic, whole),
            Case("sequoia", sequoia, whole),
            Case("sequoia, fastest", options | {"tree": "sequoia"}, whole),
            Case("dynamic, adaptive", dynamic, bought),
            Case("sequoia, adaptive", sequoia, bought),
        ]
        rows = fields(measured(job, cases, console), REFERENCE)
        show(rows, f"{count} nodes", REFERENCE, console)
        content["nodes"][str(count)] = rows
        output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    console.print(machine().line())


if __name__ == "__main__":
    typer.run(main)
