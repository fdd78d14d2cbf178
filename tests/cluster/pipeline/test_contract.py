"""Every pipeline keeps the contract of `cluster.transport.stage_spec.Pipeline`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import pytest_asyncio
from draftline.actors.kept_actors import KeptStages, LocalSupervisor
from draftline.cluster.pipeline.local_pipeline import LocalPipeline
from draftline.cluster.pipeline.ray_pipeline import RayPipeline
from draftline.cluster.transport.stage_spec import Pipeline
from draftline.core.errors import CapacityError, StageError
from draftline.core.steps import StepInput, StepOutput
from support.fakes.fake_stage import (
    FAIL_LATE_TOKEN,
    FAIL_TOKEN,
    RESET_TOKEN,
    SLOW_SECONDS,
    SLOW_TOKEN,
    fake_specs,
    fake_step,
)
from support.servers.ray_cluster import no_actors_left

NUM_STAGES = 3
pytestmark = pytest.mark.asyncio(loop_scope="module")


def local_pipeline(num_stages: int = NUM_STAGES) -> LocalPipeline:
    return LocalPipeline([spec.build() for spec in fake_specs(num_stages)], max_in_flight=4)


@dataclass
class Both:
    """A pipeline under test and what it must be equal to."""

    pipeline: Pipeline
    reference: LocalPipeline

    async def same(self, steps: list[StepInput]) -> None:
        """Submit all at once and compare the answers."""
        waiting = [self.pipeline.submit(step) for step in steps]
        for step, answer in zip(steps, waiting, strict=True):
            equal(await answer, await self.reference.submit(step))


def equal(answer: StepOutput, expected: StepOutput) -> None:
    assert answer.step_id == expected.step_id
    np.testing.assert_array_equal(answer.target_tokens, expected.target_tokens)
    assert answer.target_tokens.dtype == np.int32
    assert answer.probe_ids is None
    assert answer.log_probs.scores is None


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        "local",
        pytest.param("distributed", marks=pytest.mark.cluster),
        # Results are handed on by a thread, as those of GPUs are.
        pytest.param("apart", marks=[pytest.mark.cluster, pytest.mark.full]),
    ],
)
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Pipeline]:
    if request.param == "local":
        pipeline: Pipeline = local_pipeline()
    else:
        request.getfixturevalue("cluster")
        is_apart = request.param == "apart"
        specs = fake_specs(NUM_STAGES, is_apart=is_apart)
        pipeline = RayPipeline(specs, KeptStages(LocalSupervisor()))
    await pipeline.start()
    yield pipeline
    await pipeline.close()
    await pipeline.close()
    if isinstance(pipeline, RayPipeline):
        assert await no_actors_left()


@pytest_asyncio.fixture(loop_scope="module")
async def both(opened: Pipeline) -> Both:
    reference = local_pipeline()
    await reference.start()
    both = Both(opened, reference)
    await both.same([fake_step(0, token=RESET_TOKEN)])
    return both


async def test_steps_of_all_sizes_give_the_same_answers(both: Both) -> None:
    for step_id, num_rows in enumerate((1, 2, 16, 100, 512, 1, 7), start=1):
        await both.same([fake_step(step_id, num_rows)])


async def test_steps_in_flight_stay_in_order(both: Both) -> None:
    finished: list[int] = []

    async def submit(step: StepInput) -> None:
        equal(await answers[step.step_id], await both.reference.submit(step))
        finished.append(step.step_id)

    # The first is slow in the middle stage, so that all the others queue up behind it.
    steps = [fake_step(0, token=SLOW_TOKEN, position=1)]
    steps += [fake_step(index, num_rows=64) for index in range(1, both.pipeline.max_in_flight)]
    answers = {step.step_id: both.pipeline.submit(step) for step in steps}
    await asyncio.gather(*map(submit, steps))
    assert finished == [step.step_id for step in steps]


async def test_many_rounds_of_steps_in_flight(both: Both) -> None:
    for first in range(0, 60, 3):
        await both.same([fake_step(first + index, num_rows=1 + first) for index in range(3)])


async def test_one_step_too_many_is_refused(both: Both) -> None:
    limit = both.pipeline.max_in_flight
    steps = [fake_step(index, token=SLOW_TOKEN, position=2) for index in range(limit)]
    waiting = [asyncio.ensure_future(both.pipeline.submit(step)) for step in steps]
    with pytest.raises(CapacityError, match=f"{limit} steps are in flight"):
        both.pipeline.submit(fake_step(limit))
    for step, answer in zip(steps, waiting, strict=True):
        equal(await answer, await both.reference.submit(step))
    await both.same([fake_step(limit)])


@pytest.mark.parametrize("stage", range(NUM_STAGES))
async def test_a_failing_stage_ends_only_its_step(both: Both, stage: int) -> None:
    failing = both.pipeline.submit(fake_step(1, token=FAIL_TOKEN, position=stage))
    behind = both.pipeline.submit(fake_step(2))
    with pytest.raises(StageError, match=f"stage {stage} failed on step 1: ValueError: .*told to"):
        await failing
    assert (await behind).step_id == 2
    # Whether the stages behind the failing one ran its step is not promised: forget the past.
    await both.same([fake_step(3, token=RESET_TOKEN), fake_step(4)])


async def test_an_answer_that_fails_ends_only_its_step(both: Both) -> None:
    steps = [fake_step(1, token=FAIL_LATE_TOKEN), fake_step(2)]
    failing, behind = map(both.pipeline.submit, steps)
    with pytest.raises(StageError, match="stage 2 failed on step 1: ValueError: this answer"):
        await failing
    with pytest.raises(StageError):
        await both.reference.submit(steps[0])
    equal(await behind, await both.reference.submit(steps[1]))


async def test_every_stage_of_a_traced_step_notes_when_it_worked(both: Both) -> None:
    plain = await both.pipeline.submit(fake_step(1, num_rows=16))
    assert plain.stage_spans == ()
    slow = fake_step(2, num_rows=16, token=SLOW_TOKEN, position=1)
    steps = [replace(step, is_traced=True) for step in (slow, fake_step(3), fake_step(4))]
    waiting = [both.pipeline.submit(step) for step in steps]
    spans = [np.array((await answer).stage_spans) for answer in waiting]
    for found in spans:
        assert found.shape == (NUM_STAGES, 2)
        assert (np.diff(found.ravel()) >= 0).all(), "a stage begins after the one before it ended"
    begin, end = spans[0][1]
    assert end - begin >= 0.9 * SLOW_SECONDS
    for before, after in pairwise(spans):
        assert (after[:, 0] >= before[:, 1]).all(), "a stage runs one step after the other"
    await both.reference.submit(fake_step(1, num_rows=16))
    for step in steps:
        await both.reference.submit(step)
    await both.same([fake_step(5)])


async def test_a_traced_step_that_fails_leaves_the_next_its_own_spans(both: Both) -> None:
    failing = replace(fake_step(1, token=FAIL_TOKEN, position=1), is_traced=True)
    waiting = both.pipeline.submit(failing)
    behind = both.pipeline.submit(replace(fake_step(2), is_traced=True))
    with pytest.raises(StageError, match="stage 1 failed"):
        await waiting
    spans = np.array((await behind).stage_spans)
    assert spans.shape == (NUM_STAGES, 2)
    assert (spans > 0).all()
    await both.same([fake_step(3, token=RESET_TOKEN)])


async def test_an_abandoned_step_disturbs_nobody(both: Both) -> None:
    step = fake_step(1, token=SLOW_TOKEN, position=1)
    abandoned = asyncio.ensure_future(both.pipeline.submit(step))
    abandoned.cancel()
    await both.reference.submit(step)
    await both.same([fake_step(2), fake_step(3)])
