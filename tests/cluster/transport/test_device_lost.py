"""A device that failed for good ends its process; memory that ran out ends one step."""

from __future__ import annotations

import asyncio

import pytest
import torch
from draftline.actors.kept_actors import KeptStages, LocalSupervisor
from draftline.cluster.pipeline.local_pipeline import LocalPipeline
from draftline.cluster.pipeline.ray_pipeline import RayPipeline
from draftline.cluster.transport.stage_spec import OUT_OF_MEMORY, stage_failure
from draftline.core.errors import DeviceLost, StageError, StageLost
from support.fakes.fake_stage import LOSE_DEVICE_TOKEN, OUT_OF_MEMORY_TOKEN, fake_specs, fake_step
from support.servers.hub_session import until
from support.servers.processes import stage_worker_pids
from support.servers.ray_cluster import no_actors_left


def accelerator_error(code: int) -> torch.AcceleratorError:
    error = torch.AcceleratorError("CUDA error")
    error.error_code = code  # pyright: ignore[reportAttributeAccessIssue]
    return error


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (accelerator_error(700), True),
        (accelerator_error(OUT_OF_MEMORY), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("shapes differ"), False),
        (ValueError("wrong"), False),
    ],
)
def test_what_a_stage_raised_is_its_steps_error_or_the_end_of_its_process(
    error: Exception, is_lost: bool
) -> None:
    failure = stage_failure(1, 5, error)
    assert isinstance(failure, DeviceLost if is_lost else StageError)
    assert f"stage 1 failed on step 5: {type(error).__name__}" in str(failure)


def test_a_library_that_hides_the_devices_error_is_seen_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise accelerator_error(700)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    assert isinstance(stage_failure(0, 1, error), DeviceLost)


@pytest.mark.parametrize("num_stages", [1, 2])
async def test_a_local_pipeline_says_that_its_process_must_be_replaced(num_stages: int) -> None:
    pipeline = LocalPipeline([spec.build() for spec in fake_specs(num_stages)])
    await pipeline.start()
    with pytest.raises(StageError, match="OutOfMemoryError"):
        await pipeline.submit(fake_step(1, token=OUT_OF_MEMORY_TOKEN))
    assert (await pipeline.submit(fake_step(2))).step_id == 2
    last = num_stages - 1
    with pytest.raises(DeviceLost, match=f"stage {last} failed on step 3"):
        await pipeline.submit(fake_step(3, token=LOSE_DEVICE_TOKEN, position=last))
    await pipeline.close()
    await pipeline.start()
    with pytest.raises(DeviceLost):
        await pipeline.submit(fake_step(4))


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("is_apart", "victim"), [(False, 0), (False, 1), pytest.param(True, 1, marks=pytest.mark.full)]
)
async def test_a_stage_whose_device_is_lost_ends_its_process(is_apart: bool, victim: int) -> None:
    pipeline = RayPipeline(fake_specs(2, is_apart=is_apart), KeptStages(LocalSupervisor()))
    await pipeline.start()
    before = set(stage_worker_pids())
    with pytest.raises(StageError, match="OutOfMemoryError"):
        await pipeline.submit(fake_step(0, token=OUT_OF_MEMORY_TOKEN, position=victim))
    with pytest.raises(StageLost, match=f"stage {victim}"):
        await pipeline.submit(fake_step(1, token=LOSE_DEVICE_TOKEN, position=victim))

    async def is_gone() -> bool:
        return len(before & set(stage_worker_pids())) < len(before)

    async with asyncio.timeout(10):
        await until(is_gone)
    await pipeline.restart()
    assert (await pipeline.submit(fake_step(2))).step_id == 2
    await pipeline.close()
    assert await no_actors_left()
