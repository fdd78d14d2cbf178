"""The cost curve that an engine begins with, measured on a machine that pauses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from draftline.cluster.engine import assembly
from draftline.cluster.engine.assembly import ROWS, measure_step_cost
from draftline.core.steps import StepInput

PASS_S, ROW_S = 0.002, 0.0001


class PausedPipeline:
    """Passes move the clock; while the machine is paused they take ten times as long."""

    def __init__(self, is_paused: Callable[[float], bool]) -> None:
        self.now = 0.0
        self._is_paused = is_paused

    async def submit(self, step: StepInput) -> None:
        seconds = PASS_S + ROW_S * len(step.token_ids)
        self.now += 10 * seconds if self._is_paused(self.now) else seconds


@pytest.mark.parametrize("began_at", [0.0, 0.005, 0.02, 0.05])
async def test_a_pause_makes_no_number_of_rows_dear(began_at: float) -> None:
    pipeline = PausedPipeline(lambda now: began_at <= now < began_at + 0.1)
    cost = await measure_step_cost(pipeline, ROWS[-1], 16, lambda: pipeline.now)  # pyright: ignore[reportArgumentType]
    for rows in ROWS:
        assert cost.idle_seconds(rows) == pytest.approx(PASS_S + ROW_S * rows)
    assert pipeline.now >= assembly.MEASURED_S
