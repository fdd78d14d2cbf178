"""A stage whose device fails after the launch."""

from __future__ import annotations

import pytest
import torch
from draftline.cluster.transport import distributed_stage
from draftline.cluster.transport.distributed_stage import (
    Deliveries,
    DistributedStage,
    StageLink,
    StageRow,
)
from draftline.cluster.transport.hidden_link import HiddenLink
from draftline.core.errors import StageLost
from support.fakes.fake_stage import fake_specs


class FailingCopy:
    """A copy whose kernels failed: its numbers never arrive."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        assert len(tensors) == 1

    def wait(self) -> list[torch.Tensor]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_fails_is_told_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_stage, "HostCopy", FailingCopy)
    stage = DistributedStage(0, fake_specs(2)[0])
    stage._link = StageLink(host="", port=0, secret=b"", max_in_flight=3)
    stage._row = StageRow(
        own_host="", num_stages=2, backend="gloo", store_host="", store_port=0, meeting_s=1.0
    )
    stage._hidden_link = HiddenLink(None, 0, 2, torch.device("cpu"), "gloo")
    ended: list[Exception] = []
    stage._deliveries = Deliveries(ended.append, apart=True)
    stage._hand_on(torch.zeros(1, 256), ())
    stage._deliveries.close()
    (error,) = ended
    assert isinstance(error, StageLost)
    assert "the device of stage 0 failed: CUDA error" in str(error)
