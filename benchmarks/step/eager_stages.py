"""A stage's pass over ragged contexts: by torch's operators, own ones, and own ones in a graph.

    python -m draftline.benchmarks.step.eager_stages [--rounds 20]

Each row is a request of its own behind a context of 60 to 420 tokens, as in plain decoding of so
many streams; on the bundled target and on random weights of 100 million parameters, on one thread.
All take turns within a round. Processor time is what the thread computed, whoever else used the
machine. Prints tables and writes JSON.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from ...cluster.config import EngineConfig
from ...core.steps import SamplingRows, StepInput
from ...kernels.cpu.build import load_cpu_ops, vectors
from ...measure.records.record import machine
from ...models.load.checkpoint import resolve_model_path
from ...models.load.partition import LayerSpan
from ...models.stage.options import StageOptions
from ...models.stage.stage import Stage, load_stage

RESULTS = Path(__file__).parents[1] / "results"
CACHE = EngineConfig().compile_cache
ROWS = (1, 2, 4, 8, 16, 32, 64)
BLOCK_SIZE = 16
BLOCKS_OF_ONE = 32
CONTEXTS = (60, 420)
WAYS = {"torch": "off", "own": "auto", "own, in a graph": "on"}
WARM_UP = 3
# 101 million parameters, the embeddings of 16,384 tokens included.
RANDOM_MODEL = LlamaConfig(
    hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
    intermediate_size=2048, vocab_size=16384, max_position_embeddings=1024,
    tie_word_embeddings=False,
)  # fmt: skip


def main(
    rounds: Annotated[int, typer.Option(help="Times that each pass is measured.")] = 20,
    cache: Annotated[str, typer.Option(help="Folder of what is compiled.")] = CACHE,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS
    / "eager_stages.json",
) -> None:
    """Compare the ways to run a stage on a CPU."""
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    console = Console(width=110)
    load_cpu_ops(Path(cache).expanduser())
    found: dict[str, Any] = {"machine": machine().fields(), "lanes": vectors().lanes, "ms": {}}
    with ExitStack() as stack:
        models = {
            "demo, 5.4 M": resolve_model_path("demo"),
            "random, 101 M": stack.enter_context(random_checkpoint()),
        }
        for name, folder in models.items():
            stages = {way: _stage(folder, compile_, cache) for way, compile_ in WAYS.items()}
            found["ms"][name] = {str(rows): _costs(stages, rows, rounds) for rows in ROWS}
            _print(console, name, found["ms"][name])
    console.print(machine().line())
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=1) + "\n")


@contextmanager
def random_checkpoint() -> Iterator[Path]:
    """A folder with random weights of `RANDOM_MODEL`."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(RANDOM_MODEL).save_pretrained(folder)
        yield Path(folder)


def _stage(folder: Path, compile_: str, cache: str) -> Stage:
    layers = LlamaConfig.from_pretrained(folder).num_hidden_layers
    return load_stage(
        folder, LayerSpan(0, layers, layers), max(ROWS) * BLOCKS_OF_ONE, BLOCK_SIZE,
        options=StageOptions(compile=compile_, compile_cache=cache),
    )  # fmt: skip


def ragged_step(rows: int) -> StepInput:
    """One token for each of `rows` requests, behind contexts of random lengths."""
    rng = np.random.default_rng(0)
    contexts = rng.integers(*CONTEXTS, rows).astype(np.int32)
    none = np.empty(0, dtype=np.int32)
    tables = np.arange(rows * BLOCKS_OF_ONE, dtype=np.int32).reshape(rows, -1)
    return StepInput(
        step_id=0, moves=none.reshape(0, 2),
        token_ids=rng.integers(2, 4096, rows).astype(np.int32), positions=contexts,
        slots=tables[:, 0] * BLOCK_SIZE + contexts,
        request_starts=np.arange(rows + 1, dtype=np.int32), context_lens=contexts,
        block_tables=tables, trees=(None,) * rows, logits_rows=np.arange(rows, dtype=np.int32),
        sampling=SamplingRows.greedy(contexts.astype(np.int64) + 1), probe_rows=none,
        probe_top_k=0, scored_rows=none, scored_tokens=none,
    )  # fmt: skip


def _costs(stages: dict[str, Stage], rows: int, rounds: int) -> dict[str, dict[str, float]]:
    step = ragged_step(rows)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in stages}
    for _ in range(rounds + WARM_UP):
        for way, stage in stages.items():
            wall, processor = time.perf_counter(), time.thread_time()
            stage.run(step)
            times[way].append((time.perf_counter() - wall, time.thread_time() - processor))
    return {way: _figures(found[WARM_UP:]) for way, found in times.items()}


def _figures(times: list[tuple[float, float]]) -> dict[str, float]:
    wall, processor = ([1e3 * seconds for seconds in each] for each in zip(*times, strict=True))
    return {
        "wall_min": round(min(wall), 3),
        "wall_median": round(statistics.median(wall), 3),
        "processor_min": round(min(processor), 3),
        "processor_median": round(statistics.median(processor), 3),
    }


def _print(console: Console, name: str, found: dict[str, dict[str, dict[str, float]]]) -> None:
    table = Table("rows", *WAYS, title=f"{name}: processor ms of a pass, minimum / median")
    for rows, costs in found.items():
        cells = (
            f"{cost['processor_min']:.2f} / {cost['processor_median']:.2f}"
            for cost in costs.values()
        )
        table.add_row(rows, *cells)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
