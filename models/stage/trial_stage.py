"""The part of a stage that trial steps need, before it serves."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...core.steps import StepInput
from ..attention.paged_kv import PagedKv


class TrialStage(Protocol):
    """A stage that can run trial steps."""

    kv: PagedKv
    block_size: int

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        ...

    def empty_hidden(self, num_rows: int) -> Tensor:
        """Zeros in the shape of the hidden states that `run` takes where it embeds no tokens."""
        ...

    def run(self, step: StepInput, hidden: Tensor | None = None) -> object:
        """Runs one step."""
        ...
