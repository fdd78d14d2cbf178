"""When each stage worked on a traced step."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ...core.arrays import Span
from ...core.steps import StepInput, StepOutput
from .stage_spec import StageRunner, guarded, run_stage

if TYPE_CHECKING:
    import torch

# The clock of all stages and of the engine's trace: equal for all processes of one host, and on
# several hosts as equal as their clocks are kept.
wall_clock = time.time


# One span a stage that worked on the step so far.
Spans = tuple[Span, ...]


def run_traced(
    index: int, stage: StageRunner, step: StepInput, hidden: torch.Tensor | None, spans: Spans
) -> tuple[torch.Tensor | StepOutput, Spans]:
    """Run a traced step; its result, and its span behind those of the stages before it.

    An answer carries them all.
    """
    begin = wall_clock()
    result = run_stage(index, stage, step, hidden)
    if not isinstance(result, StepOutput):
        hidden_states = result
        # What the device met before it finishes is the step's failure, too.
        guarded(index, step, lambda: _finish(hidden_states))
    spans = (*spans, (begin, wall_clock()))
    if isinstance(result, StepOutput):
        result = replace(result, stage_spans=spans)
    return result, spans


def _finish(hidden: torch.Tensor) -> None:
    """Wait for a device that computes on its own; without this its time would be the next one's."""
    if getattr(hidden, "is_cuda", False):
        import torch  # noqa: PLC0415 - here already, and not needed on a CPU

        torch.cuda.synchronize(hidden.device)
