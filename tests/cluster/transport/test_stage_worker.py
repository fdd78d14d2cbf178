"""A step through the workers of a compiled graph, without Ray."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from draftline.cluster.pipeline.local_pipeline import LocalPipeline
from draftline.cluster.transport.messages import StepWriter, decode_result
from draftline.cluster.transport.stage_worker import WARM_UP, StageWorker
from draftline.core.errors import ProtocolError, StageError
from draftline.core.steps import StepInput, StepOutput
from support.fakes.fake_stage import FAIL_TOKEN, fake_specs, fake_step

NUM_STAGES = 3


@pytest.fixture
def workers() -> list[StageWorker]:
    workers = []
    for index, spec in enumerate(fake_specs(NUM_STAGES)):
        worker = StageWorker()
        worker._index, worker._spec, worker._stage = index, spec, spec.build()
        workers.append(worker)
    return workers


def passed(workers: list[StageWorker], payload: bytes) -> Any:
    carried = None
    for worker in workers:
        carried = worker.run_payload(payload, carried)
    return carried


@pytest.mark.parametrize("is_traced", [False, True])
async def test_a_payload_gives_the_answer_of_a_local_pipeline(
    workers: list[StageWorker], is_traced: bool
) -> None:
    local = LocalPipeline([spec.build() for spec in fake_specs(NUM_STAGES)])
    await local.start()
    writer = StepWriter(1)
    for step_id in range(3):
        step: StepInput = replace(fake_step(step_id), is_traced=is_traced)
        sequence, answer = decode_result(passed(workers, writer.write(step_id + 9, step).whole))
        expected = await local.submit(step)
        assert isinstance(answer, StepOutput)
        assert (sequence, answer.step_id) == (step_id + 9, step_id)
        assert np.array_equal(answer.target_tokens, expected.target_tokens)
        assert len(answer.stage_spans) == len(expected.stage_spans) == NUM_STAGES * is_traced


@pytest.mark.parametrize("victim", range(NUM_STAGES))
def test_a_failure_passes_the_stages_behind_it(workers: list[StageWorker], victim: int) -> None:
    step = fake_step(1, token=FAIL_TOKEN, position=victim)
    sequence, error = decode_result(passed(workers, StepWriter(1).write(4, step).whole))
    assert sequence == 4
    assert isinstance(error, StageError)
    assert f"stage {victim} failed on step 1: ValueError" in str(error)


def test_a_warm_up_runs_nothing(workers: list[StageWorker]) -> None:
    assert passed(workers, WARM_UP) == WARM_UP
    assert passed([StageWorker()], WARM_UP) == WARM_UP


def test_a_payload_that_is_no_step_is_refused(workers: list[StageWorker]) -> None:
    with pytest.raises(ProtocolError, match="not a message between stages"):
        workers[0].run_payload(b"\xc1")
