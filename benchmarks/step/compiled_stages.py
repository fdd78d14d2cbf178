"""Compiled stages beside eager ones and llama.cpp, on as many threads, in one run.

    python -m draftline.benchmarks.step.compiled_stages [--llama-python PATH] [--rounds 30]
        [--threads 1]

First what a pass costs, by rows and context, on the bundled target and on random weights of 45
million parameters; then batch-1 decoding of held-out prompts by the bundled target: plain and with
drafters, by torch's operators, own ones and compiled, and by llama.cpp, plain and with its prompt
lookup. All take turns within a round. Weights are float32 everywhere; llama.cpp keeps its KV in
float16, its default. Prints tables and writes JSON.
"""

from __future__ import annotations

import json
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from ...cluster.config import EngineConfig
from ...measure.records.record import machine
from ...models.load.checkpoint import resolve_model_path
from ..peers.llama.llama_peer import HOW_TO, LlamaPeer
from .batch_one import decode_rates
from .pass_cost import VARIANTS, Pass, random_checkpoint, stage_pass

RESULTS = Path(__file__).parents[1] / "results"
CACHE = EngineConfig().compile_cache
ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 512)


def main(  # noqa: PLR0913, PLR0917 - one parameter a flag
    llama_python: Annotated[Path | None, typer.Option(help="A Python that has llama_cpp.")] = None,
    rounds: Annotated[
        int, typer.Option(help="Times that each pass is measured; 0: no passes.")
    ] = 30,
    prompts: Annotated[int, typer.Option(help="Held-out prompts to decode; 0: none.")] = 8,
    tokens: Annotated[int, typer.Option(help="New tokens for each.")] = 128,
    decode_rounds: Annotated[int, typer.Option(help="Times that each mode decodes.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of each.")] = 1,
    cache: Annotated[str, typer.Option(help="Folder of what is compiled.")] = CACHE,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS
    / "compiled_stages.json",
) -> None:
    """Compare eager stages, compiled stages and llama.cpp."""
    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()
    console = Console(width=110)
    if llama_python is None:
        console.print(HOW_TO)
    found: dict[str, Any] = {"machine": machine().fields(), "threads": threads, "passes": {}}
    demo = resolve_model_path("demo")
    with ExitStack() as stack:
        models = {"demo, 5.4 M": demo, "random, 45 M": stack.enter_context(random_checkpoint())}
        for name, folder in models.items() if rounds else ():
            found["passes"][name] = _passes(folder, llama_python, rounds, cache)
            _print_passes(console, name, found["passes"][name])
    if prompts:
        peer = LlamaPeer(llama_python, demo, threads) if llama_python else None
        found["decode"] = decode_rates(peer, prompts, tokens, decode_rounds, cache)
        _print_rates(console, found["decode"])
    console.print(machine().line())
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=1) + "\n")


def _passes(folder: Path, python: Path | None, rounds: int, cache: str) -> dict[str, Any]:
    """Milliseconds by who, context and rows, and what each took to be ready."""
    runs: dict[str, Pass] = {}
    ready = {}
    for variant in VARIANTS:
        runs[variant], ready[variant] = stage_pass(folder, variant, cache)
    with ExitStack() as stack:
        if python is not None:
            peer = stack.enter_context(LlamaPeer(python, folder, torch.get_num_threads()))
            runs["llama.cpp"] = lambda rows, context: peer.pass_seconds(context, rows)
        costs = {
            str(context): {str(rows): _cost(runs, rows, context, rounds) for rows in ROWS}
            for context in CONTEXTS
        }
    return {"ready_s": ready, "pass_ms": costs}


def _cost(runs: dict[str, Pass], rows: int, context: int, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {who: [] for who in runs}
    for number in range(rounds + 2):
        for who, run in runs.items():
            seconds = run(rows, context)
            if number >= 2:
                times[who].append(1e3 * seconds)
    return {
        who: {"min": round(min(found), 3), "median": round(statistics.median(found), 3)}
        for who, found in times.items()
    }


def _print_passes(console: Console, name: str, found: dict[str, Any]) -> None:
    for context, by_rows in found["pass_ms"].items():
        title = f"{name}: ms of a pass behind {context} tokens, minimum / median"
        table = Table("rows", *next(iter(by_rows.values())), title=title)
        for rows, costs in by_rows.items():
            cells = (f"{cost['min']:.2f} / {cost['median']:.2f}" for cost in costs.values())
            table.add_row(rows, *cells)
        console.print(table)
    ready = ", ".join(f"{who} {seconds:.1f}" for who, seconds in found["ready_s"].items())
    console.print(f"seconds until ready: {ready}")


def _print_rates(console: Console, found: dict[str, Any]) -> None:
    columns = ("mode", "tokens/s", "(min - max)", "x llama.cpp plain", "x llama.cpp best")
    table = Table(*columns, title="Batch 1, greedy; medians over rounds")
    for name, mode in found.items():
        rates = mode["tokens_per_second"]
        ratios = (mode.get("to_llama_plain"), mode.get("to_llama_best"))
        table.add_row(
            name,
            f"{statistics.median(rates):.0f}",
            f"{min(rates):.0f} - {max(rates):.0f}",
            *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
