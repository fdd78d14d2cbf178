"""Steps as an engine builds them, of trees and prompt chunks."""

from __future__ import annotations

from dataclasses import replace

from draftline.core.steps import StepInput, StepTrees
from support.fakes.fake_bench import Bench


async def engine_steps() -> list[StepInput]:
    """Those of three requests that come together."""
    bench = Bench(seed=3, is_adaptive=False, rows=20)
    for name in ("a", "bb", "ccc"):
        bench.add(name, [1, 2, 3] * 12, 12)
    await bench.run()
    return bench.target.steps


def two_ways(step: StepInput) -> tuple[StepInput, StepInput]:
    """The step, and the same with a tuple of trees."""
    assert isinstance(step.trees, StepTrees)
    return step, replace(step, trees=tuple(step.trees))
