"""Stages that meet before they are built, without Ray."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from draftline.cluster.transport import distributed_stage, stage_worker
from draftline.cluster.transport.distributed_stage import StageRow
from draftline.cluster.transport.stage_worker import StageWorker
from draftline.core.errors import StageLost
from support.fakes.fake_stage import fake_specs

NUM_STAGES = 3


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
