"""Pipelines of Ray actors when stages die, do not start, or are not wanted any more."""

from __future__ import annotations

import asyncio

import pytest
from draftline.actors.kept_actors import KeptStages, OwnKeeper
from draftline.cluster.config import TransportName
from draftline.cluster.ray_pipeline import RayPipeline
from draftline.core.errors import CheckpointError, ConfigError, StageLost
from support.fake_stage import DIE_TOKEN, SLOW_TOKEN, fake_specs, fake_step
from support.ray_cluster import no_actors_left

DETECTION_S = 2.0
TEARDOWN_S = 10.0

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("cluster")]


@pytest.mark.parametrize(
    ("transport", "is_apart", "victim"),
    [("distributed", False, 0), ("distributed", True, 1), ("compiled_graph", False, 1)],
)
async def test_a_killed_stage_ends_all_steps_and_a_restart_works(
    transport: TransportName, is_apart: bool, victim: int
) -> None:
    pipeline = RayPipeline(fake_specs(2, is_apart=is_apart), KeptStages(OwnKeeper()), transport=transport)
    await pipeline.start()
    fresh = (await pipeline.submit(fake_step(0))).target_tokens.tolist()
    # A slow step before the deadly one: the answer to it may still come, or not.
    waiting = [pipeline.submit(fake_step(1, token=DIE_TOKEN, position=victim))]
    waiting.append(pipeline.submit(fake_step(2, token=SLOW_TOKEN)))
    async with asyncio.timeout(DETECTION_S):
        for step in waiting:
            with pytest.raises(StageLost, match=f"stage {victim}"):
                await step
    with pytest.raises(StageLost, match=f"stage {victim}"):
        await pipeline.submit(fake_step(3))
    async with asyncio.timeout(TEARDOWN_S):
        await pipeline.close()
    assert await no_actors_left()
    await pipeline.restart()
    # New stages have no past.
    assert (await pipeline.submit(fake_step(0))).target_tokens.tolist() == fresh
    closing = pipeline.submit(fake_step(1, token=SLOW_TOKEN))
    async with asyncio.timeout(TEARDOWN_S):
        await asyncio.gather(pipeline.close(), pipeline.close())
    with pytest.raises(StageLost, match="closed"):
        await closing
    with pytest.raises(StageLost, match="closed"):
        await pipeline.submit(fake_step(2))
    assert await no_actors_left()


async def test_a_stage_that_cannot_be_built_says_why_and_leaves_nothing() -> None:
    specs = fake_specs(2, error=CheckpointError("shard 2 is missing"))
    pipeline = RayPipeline(specs, KeptStages(OwnKeeper()))
    with pytest.raises(CheckpointError, match="shard 2 is missing"):
        await pipeline.start()
    assert await no_actors_left()
    with pytest.raises(StageLost, match="did not start"):
        await pipeline.submit(fake_step(0))


async def test_nccl_without_gpus_is_refused_and_leaves_nothing() -> None:
    pipeline = RayPipeline(fake_specs(2), KeptStages(OwnKeeper()), transport="nccl")
    with pytest.raises(ConfigError, match="stage_transport: nccl needs a GPU of its own"):
        await pipeline.start()
    assert await no_actors_left()


async def test_a_cluster_without_room_is_reported() -> None:
    pipeline = RayPipeline(fake_specs(1, num_cpus=64), KeptStages(OwnKeeper()), start_timeout_s=0.5)
    with pytest.raises(StageLost, match="free resources"):
        await pipeline.start()
    assert await no_actors_left()
