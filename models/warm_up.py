"""Runs a compiled stage once before it serves, with a progress bar on a terminal."""

from __future__ import annotations

from typing import Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from ..core.prompt_step import prompt_step
from ..core.types import StepInput
from .paged_kv import PagedKv

# The first compiles; the others show that it serves them too.
ROWS = (1, 2, 16, 64)


class WarmStage(Protocol):
    """What is run."""

    kv: PagedKv
    block_size: int

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        ...

    @property
    def hidden_size(self) -> int:
        """Columns of the hidden states that it takes otherwise."""
        ...

    def run(self, step: StepInput, hidden: Tensor | None = None) -> object:
        """Runs one step."""
        ...


def warm_up(stage: WarmStage) -> None:
    """Run prompts of `ROWS` tokens; the cache is as it was. Raises what `run` raises."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    rows = [count for count in ROWS if count <= stage.kv.num_slots]
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("compiling", total=len(rows))
        for count in rows:
            hidden = None if stage.is_first else torch.zeros(count, stage.hidden_size)
            stage.run(prompt_step(count, stage.block_size), hidden)
            progress.update(task, advance=1, description=f"warm at {count} rows")
    stage.kv.data.zero_()
