"""Stages that compute nothing and pass arrays of the right shapes on.

Apart from the benchmarks that run them, since a stage's own process imports them by name.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...cluster.transport.stage_spec import StageSpec
from ...core.progress import Progress, unseen
from ...core.steps import StepInput, StepOutput

if TYPE_CHECKING:
    from ...models.stage.pending_output import PendingOutput

# The step id that kills the last stage.
DEATH = -1


@dataclass(frozen=True, slots=True)
class EchoStage:
    """Passes arrays of the right shapes on."""

    is_last: bool
    hidden_size: int
    num_blocks: int = 1
    decodes_several: bool = False

    def reset(self) -> None:
        """Nothing is kept."""

    def launch(self, step: StepInput, hidden: torch.Tensor | None) -> torch.Tensor | PendingOutput:
        """Nothing is computed; a step id of `DEATH` kills the last stage."""
        if not self.is_last:
            return torch.zeros(len(step.token_ids), self.hidden_size) if hidden is None else hidden
        if step.step_id == DEATH:
            os.kill(os.getpid(), signal.SIGKILL)
        output = StepOutput(step.step_id, step.token_ids, step.moves, step.sampling.temperature)
        return lambda: output


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoSpec(StageSpec):
    """Builds an `EchoStage`."""

    def build(self, progress: Progress = unseen) -> EchoStage:  # noqa: ARG002 - the interface
        """See `StageSpec`: there is nothing to load."""
        return EchoStage(self.span.is_last, self.hidden_size)
