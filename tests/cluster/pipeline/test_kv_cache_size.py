"""Stages that size their caches themselves: the scheduler learns how many blocks there are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from draftline.cluster.config import EngineConfig
from draftline.cluster.engine.assembly import Assembly, plan_model
from draftline.cluster.pipeline.local_pipeline import LocalPipeline
from draftline.cluster.transport.stage_spec import StageSpec
from draftline.core.kv_cache import BlockPool
from draftline.core.steps import StepInput
from support.fakes.fake_stage import FakeStage, fake_step

if TYPE_CHECKING:
    from draftline.models.stage.stage import PendingOutput


async def test_the_smallest_cache_counts_and_stays_as_large() -> None:
    plan = plan_model(EngineConfig(model="demo", pipeline_parallel_size=2, block_size=4))
    unsized = tuple(replace(spec, num_blocks=None) for spec in plan.specs)
    asked: list[int | None] = []
    num_rows: list[int] = []

    class Stage(FakeStage):
        def launch(
            self, step: StepInput, hidden: torch.Tensor | None
        ) -> torch.Tensor | PendingOutput:
            num_rows.append(len(step.token_ids))
            return super().launch(step, hidden)

    def make(specs: Sequence[StageSpec]) -> LocalPipeline:
        asked.extend(spec.num_blocks for spec in specs)
        return LocalPipeline(
            [
                Stage(index, spec.span.is_last, num_blocks=spec.num_blocks or found)
                for index, (spec, found) in enumerate(zip(specs, (9, 7), strict=True))
            ]
        )

    assembly = Assembly(replace(plan, specs=unsized), make, ())
    await assembly.start()
    assert assembly.scheduler._pool.num_blocks == 7
    assert 1 < max(num_rows) <= 7 * 4
    await assembly.recover()
    assert asked == [None, None]
    assert assembly.pipeline.num_blocks == 7
    await assembly.stop()


def test_a_pool_that_was_resized() -> None:
    pool = BlockPool(1, 4)
    pool.resize(3)
    pool.check()
    assert pool.num_free == 3
    assert pool.usage == 0
    held = pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.resize(5)
    pool.free(held)
    pool.check()


async def test_a_pipeline_that_is_closed_keeps_no_stage() -> None:
    """A GPU's whole memory may be the next engine's, whoever still holds the last one."""
    stages = [FakeStage(index, index == 1) for index in range(2)]
    alive = [weakref.ref(stage) for stage in stages]
    pipeline = LocalPipeline(stages)
    del stages
    await pipeline.start()
    await pipeline.submit(fake_step(0))
    await pipeline.restart()
    await pipeline.submit(fake_step(1))
    await pipeline.close()
    gc.collect()
    assert [stage() for stage in alive] == [None, None]
    assert (pipeline.num_stages, pipeline.num_blocks, pipeline.decodes_several) == (2, 1, False)
    assert [kept.weights for kept in pipeline.memory] == [1000, 1000]
