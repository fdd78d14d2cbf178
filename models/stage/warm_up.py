"""Warm-up and graph capture of a stage before it serves, with a progress bar on a terminal."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ...core.steps import prompt_step
from .graph_runner import GraphReport, GraphRunner
from .memory import TrialStage

# The first compiles; the others show that it serves them too.
ROWS = (1, 2, 16, 64)


def warm_up(stage: TrialStage) -> None:
    """Run prompts of `ROWS` tokens, then zero the KV cache. Raises what `run` raises."""
    rows = [count for count in ROWS if count <= stage.kv.num_slots]
    with _progress() as progress:
        task = progress.add_task("compiling", total=len(rows))
        for count in rows:
            hidden = None if stage.is_first else stage.empty_hidden(count)
            stage.run(prompt_step(count, stage.block_size), hidden)
            progress.update(task, advance=1, description=f"warm at {count} rows")
    stage.kv.data.zero_()


def capture(runner: GraphRunner) -> GraphReport:
    """Capture the CUDA graphs of a stage, the largest first."""
    with _progress() as progress:
        task = progress.add_task("capturing", total=len(runner.rows) + len(runner.narrow_rows))

        def show(rows: int) -> None:
            progress.update(task, advance=1, description=f"captured at {rows} rows")

        return runner.capture_all(time.monotonic, show)


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
