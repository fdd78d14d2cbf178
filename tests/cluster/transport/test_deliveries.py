"""What a stage hands on goes out in order, beside the stage or by it."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from draftline.cluster.transport.distributed_stage import Deliveries
from draftline.core.errors import StageLost


@pytest.mark.parametrize("apart", [False, True])
def test_all_are_done_in_order_before_it_is_closed(apart: bool) -> None:
    done: list[int] = []
    ended: list[Exception] = []
    deliveries = Deliveries(ended.append, apart=apart)
    for number in range(50):
        deliveries.add(partial(done.append, number))
    deliveries.close()
    assert done == list(range(50))
    assert not ended


def test_the_stage_goes_on_while_one_waits() -> None:
    gate, done = threading.Event(), threading.Event()
    deliveries = Deliveries(pytest.fail, apart=True)
    deliveries.add(lambda: done.set() if gate.wait(10) else None)
    assert not done.is_set()
    gate.set()
    deliveries.close()
    assert done.is_set()


@pytest.mark.parametrize("error", [StageLost("stage 2 is out of reach"), ConnectionResetError()])
def test_the_first_loss_is_told_once_and_ends_it(error: Exception) -> None:
    ended: list[Exception] = []
    done: list[int] = []

    def fail() -> None:
        raise error

    deliveries = Deliveries(ended.append, apart=True)
    deliveries.add(fail)
    deliveries.add(partial(done.append, 1))
    deliveries.add(fail)
    deliveries.close()
    assert ended == [error]
    assert not done
    with pytest.raises(type(error)):
        Deliveries(ended.append, apart=False).add(fail)
    assert ended == [error]
