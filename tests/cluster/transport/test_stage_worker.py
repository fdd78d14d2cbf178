"""A step through the workers of a compiled graph, without Ray."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from draftline.cluster.pipeline.local_pipeline import LocalPipeline
from draftline.cluster.transport import distributed_stage, stage_worker
from draftline.cluster.transport.distributed_stage import StageRow
from draftline.cluster.transport.messages import StepWriter, decode_result
from draftline.cluster.transport.stage_worker import WARM_UP, StageWorker
from draftline.core.errors import ProtocolError, StageError, StageLost
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


@pytest.mark.net
def test_stages_meet_before_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """What connects GPUs takes memory, which a cache that is sized later leaves alone."""
    monkeypatch.setattr(stage_worker, "ray", Mock())
    workers = [StageWorker() for _ in range(NUM_STAGES)]
    places = [
        worker.assign(index, pickle.dumps(spec))
        for index, (worker, spec) in enumerate(zip(workers, fake_specs(NUM_STAGES), strict=True))
    ]
    assert [place.gpu for place in places] == [None] * NUM_STAGES
    row = StageRow(
        own_host="127.0.0.1", num_stages=NUM_STAGES, backend="gloo", store_host="127.0.0.1",
        store_port=workers[0].open_store("127.0.0.1"), meeting_s=30.0,
    )  # fmt: skip
    with ThreadPoolExecutor(NUM_STAGES) as threads:
        list(threads.map(lambda worker: worker.meet(row), workers))
    assert all(worker._stage is None for worker in workers)
    for worker in workers:
        worker.build()
        assert worker._distributed is not None
        assert worker._distributed._hidden_link is not None


@pytest.mark.net
def test_a_neighbour_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_worker, "ray", Mock())
    monkeypatch.setattr(distributed_stage, "open_group", lambda *_: Mock(recv=never, send=never))
    workers = [StageWorker() for _ in range(2)]
    for index, (worker, spec) in enumerate(zip(workers, fake_specs(2), strict=True)):
        worker.assign(index, pickle.dumps(spec))
    row = StageRow(
        own_host="127.0.0.1", num_stages=2, backend="nccl", store_host="127.0.0.1",
        store_port=workers[0].open_store("127.0.0.1"), meeting_s=0.05,
    )  # fmt: skip
    for index, worker in enumerate(workers):
        told = f"stage {index} does not reach stage {1 - index} by nccl: nothing came within 0.05 s"
        with pytest.raises(StageLost, match=told):
            worker.meet(row)


def never(*_: object) -> Mock:
    return Mock(is_completed=lambda: False)
