"""What trial steps are run on, before a stage serves."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...core.steps import StepInput
from ..attention.paged_kv import PagedKv


class TrialStage(Protocol):
    """A stage, as far as trials need it."""

    kv: PagedKv
    block_size: int

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        ...

    def empty_hidden(self, num_rows: int) -> Tensor:
        """Hidden states that it could take otherwise."""
        ...

    def run(self, step: StepInput, hidden: Tensor | None = None) -> object:
        """Runs one step."""
        ...
