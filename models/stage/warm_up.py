"""Warm-up and graph capture of a stage before it serves, with a progress bar on a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ...core.request.allowed_tokens import full_mask
from ...core.steps import (
    LogitEdits,
    LogProbInput,
    Penalties,
    SamplingRows,
    StepInput,
    TreeRows,
    prompt_step,
)
from ...core.tree.tree import pack
from ...kernels.attention.split_rule import LEAST_SPLIT_OF_ONE_TILE, TILE_LINES
from ...kernels.int8.reference import MOST_INT8_ROWS
from ...kernels.linear.reference import MOST_FEW_ROWS
from .gpu_path import GraphPath, GraphReport
from .memory import TrialStage

# Numbers of rows: one for each tile size of products, and one for the library's products.
ROWS_OF_PRODUCTS = (1, 17, 33, MOST_FEW_ROWS + 1, MOST_INT8_ROWS + 1)


def warm_kernels(stage: TrialStage, share: int, vocab_size: int) -> None:
    """Run a step for every kernel that serving may use, then zero the KV cache.

    Triton takes seconds to compile a kernel at its first launch, which must not delay a request.

    share  query heads of a key/value head

    Raises the errors of `run`.
    """
    steps = list(_kernel_steps(stage, share, vocab_size))
    with _progress() as progress:
        task = progress.add_task("compiling", total=len(steps))
        for name, step in steps:
            count = len(step.token_ids)
            stage.run(step, None if stage.is_first else stage.empty_hidden(count))
            progress.update(task, advance=1, description=f"compiled {name}")
    stage.kv.data.zero_()


def _kernel_steps(
    stage: TrialStage, share: int, vocab_size: int
) -> Iterator[tuple[str, StepInput]]:
    block_size, num_slots = stage.block_size, stage.kv.num_slots
    rows = {*ROWS_OF_PRODUCTS, *(max(lines // share, 1) for lines in TILE_LINES)}
    for count in sorted(rows):
        if count <= num_slots:
            yield f"for {count} rows", prompt_step(count, block_size)
    one = prompt_step(1, block_size)
    own = TreeRows(pack(np.ones((1, 1), dtype=np.bool_)), one.slots, one.positions)
    yield "for trees", replace(one, trees=(own,))
    context = 2 * LEAST_SPLIT_OF_ONE_TILE
    if context < num_slots:
        yield "for contexts that are split", _behind(one, context, block_size)
    yield "for moves of keys", replace(one, moves=np.zeros((1, 2), dtype=np.int32))
    edits = (_edits(vocab_size),)
    for name, top_k in (("for filters and edits of logits", 2), ("for temperatures", 0)):
        sampling, wanted = _sampled(one.sampling, top_k), LogProbInput(of_targets=True)
        yield name, replace(one, sampling=sampling, edits=edits, log_probs=wanted)


def _behind(step: StepInput, context: int, block_size: int) -> StepInput:
    """A step of one row after a context of this length, in the first blocks."""
    place = np.array([context], dtype=np.int32)
    tables = np.arange(context // block_size + 1, dtype=np.int32)[None]
    return replace(step, positions=place, slots=place, context_lens=place, block_tables=tables)


def _sampled(greedy: SamplingRows, top_k: int) -> SamplingRows:
    ones = np.ones(len(greedy.position), dtype=np.float32)
    if not top_k:
        return replace(greedy, temperature=ones)
    return replace(
        greedy, temperature=ones, top_k=greedy.top_k + np.int32(top_k),
        top_p=ones * np.float32(0.9), min_p=ones * np.float32(0.01),
    )  # fmt: skip


def _edits(vocab_size: int) -> LogitEdits:
    first = np.zeros(1, dtype=np.int32)
    penalties = Penalties(
        first, first, np.zeros(1, dtype=np.bool_), first, first,
        repetition=1.1, presence=0.1, frequency=0.1,
    )  # fmt: skip
    bias = np.zeros(1, dtype=np.float32)
    return LogitEdits(0, 1, first, bias, penalties, full_mask(vocab_size)[None])


def capture(path: GraphPath) -> GraphReport:
    """Capture the CUDA graphs of a stage, the largest first."""
    with _progress() as progress:
        task = progress.add_task("capturing", total=len(path.rows) + len(path.narrow_rows))

        def show(rows: int) -> None:
            progress.update(task, advance=1, description=f"captured at {rows} rows")

        return path.capture_all(time.monotonic, show)


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
