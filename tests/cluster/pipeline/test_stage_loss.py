"""Pipelines of Ray actors when stages die, do not start, or are not wanted any more."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from draftline.actors.kept_actors import KeptStages, LocalSupervisor
from draftline.cluster.pipeline import ray_pipeline
from draftline.cluster.pipeline.ray_pipeline import RayPipeline
from draftline.cluster.pipeline.supervisor import Taken
from draftline.cluster.transport.stage_spec import StageSpec
from draftline.core.errors import CheckpointError, ConfigError, StageLost
from support.fakes.fake_stage import DIE_TOKEN, SLOW_TOKEN, fake_specs, fake_step
from support.servers.processes import is_alive, send_signal
from support.servers.ray_cluster import no_actors_left

DETECTION_S = 2.0
TEARDOWN_S = 10.0

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("cluster")]


@pytest.mark.full
@pytest.mark.parametrize(("is_apart", "victim"), [(False, 0), (True, 1), (False, 1)])
async def test_a_killed_stage_ends_all_steps_and_a_restart_works(
    is_apart: bool, victim: int
) -> None:
    stages = KeptStages(LocalSupervisor())
    pipeline = RayPipeline(fake_specs(2, is_apart=is_apart), stages)
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
    assert await pipeline.restart() == (0, 1)
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


async def pids_of(pipeline: RayPipeline) -> list[int]:
    stages = [pipeline._stages[index] for index in range(pipeline.num_stages)]
    return [await stage.__ray_call__.remote(lambda _: os.getpid()) for stage in stages]


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "victim"), [(signal.SIGSTOP, 1), (signal.SIGSTOP, 0), (signal.SIGKILL, 0)]
)
async def test_a_restart_keeps_the_stage_that_lives_and_replaces_the_other(
    number: signal.Signals, victim: int
) -> None:
    supervisor = LocalSupervisor(num_spares=1)
    pipeline = RayPipeline(fake_specs(2), KeptStages(supervisor))
    await pipeline.start()
    fresh = (await pipeline.submit(fake_step(0))).target_tokens.tolist()
    before = await pids_of(pipeline)
    send_signal(before[victim], number)
    waiting = asyncio.ensure_future(pipeline.submit(fake_step(1)))
    assert await pipeline.restart() == (victim,)
    with pytest.raises(StageLost):
        await waiting
    after = await pids_of(pipeline)
    assert after[1 - victim] == before[1 - victim]
    assert after[victim] != before[victim]
    # The stage that stayed has no past either.
    assert (await pipeline.submit(fake_step(0))).target_tokens.tolist() == fresh
    await pipeline.close()
    supervisor.close()
    assert await no_actors_left()
    assert not is_alive(before[victim])


async def test_a_paused_stage_is_lost_and_does_not_hold_up_the_end() -> None:
    pipeline = RayPipeline(fake_specs(2), KeptStages(LocalSupervisor()))
    await pipeline.start()
    (_, paused) = await pids_of(pipeline)
    send_signal(paused, signal.SIGSTOP)
    async with asyncio.timeout(TEARDOWN_S):
        with pytest.raises(StageLost, match="stage 1 was silent"):
            await pipeline.submit(fake_step(1))
        await pipeline.close()
    assert await no_actors_left()


@pytest.mark.full
async def test_a_stage_of_a_dead_coordinator_goes_on_with_its_successor() -> None:
    """The first coordinator's connection is cut, so that it can drive the stage no more."""
    supervisor = LocalSupervisor()
    first = RayPipeline(fake_specs(1), KeptStages(supervisor))
    await first.start()
    fresh = (await first.submit(fake_step(0))).target_tokens.tolist()

    class Inherited(KeptStages):
        async def take(self, index: int, spec: StageSpec) -> Taken:
            return Taken(first._stages[index], is_kept=True)

    second = RayPipeline(fake_specs(1), Inherited(supervisor))
    await second.start()
    assert await pids_of(second) == await pids_of(first)
    with pytest.raises(StageLost, match="stage 0"):
        await first.submit(fake_step(1))
    assert (await second.submit(fake_step(0))).target_tokens.tolist() == fresh
    await second.close()
    await first.close()
    assert await no_actors_left()


async def test_a_stage_that_cannot_be_built_says_why_and_leaves_nothing() -> None:
    specs = fake_specs(2, error=CheckpointError("shard 2 is missing"))
    pipeline = RayPipeline(specs, KeptStages(LocalSupervisor()))
    with pytest.raises(CheckpointError, match="shard 2 is missing"):
        await pipeline.start()
    assert await no_actors_left()
    with pytest.raises(StageLost, match="did not start"):
        await pipeline.submit(fake_step(0))


async def test_nccl_without_gpus_is_refused_and_leaves_nothing() -> None:
    pipeline = RayPipeline(fake_specs(2), KeptStages(LocalSupervisor()), transport="nccl")
    with pytest.raises(ConfigError, match="stage_transport: nccl needs a GPU of its own"):
        await pipeline.start()
    assert await no_actors_left()


async def test_a_cluster_without_room_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_pipeline, "ROOM_S", 0.1)
    pipeline = RayPipeline(
        fake_specs(1, num_cpus=64), KeptStages(LocalSupervisor()), start_timeout_s=0.5
    )
    with pytest.raises(StageLost, match="free resources"):
        await pipeline.start()
    assert "event=stages_wait stages=1 need=64cpu,0gpu free=" in caplog.text
    assert await no_actors_left()
