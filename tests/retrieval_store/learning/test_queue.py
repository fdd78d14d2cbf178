from __future__ import annotations

import threading

import pytest
from draftline.core.errors import StoreError
from draftline.core.interfaces import Ended
from draftline.retrieval_store.learning import LearningQueue
from support.inputs.segments import context
from support.servers.learning_replica import soon

ENDED = [Ended(f"n{index}", context(1, 2, 3)) for index in range(8)]


class Heard:
    """A sink that keeps what it hears."""

    def __init__(self) -> None:
        self.ended: list[Ended] = []

    def __call__(self, ended: Ended) -> dict[str, int]:
        self.ended.append(ended)
        return {"learned": 1, "credited": 2}


def test_all_are_handed_on_in_order_before_it_closes() -> None:
    heard = Heard()
    queue = LearningQueue(heard)
    for ended in ENDED:
        queue.learn(ended)
    queue.close()
    assert heard.ended == ENDED
    assert queue.counts == {"learned": 8, "credited": 16}


def test_a_full_queue_drops_and_counts_and_never_waits() -> None:
    begun, go_on = threading.Event(), threading.Event()
    heard = Heard()

    def slow(ended: Ended) -> dict[str, int]:
        begun.set()
        go_on.wait()
        return heard(ended)

    queue = LearningQueue(slow, max_waiting=3)
    queue.learn(ENDED[0])
    assert begun.wait(timeout=30)
    for ended in ENDED[1:]:
        queue.learn(ended)
    assert queue.counts == {"dropped": 4}
    go_on.set()
    queue.close()
    assert heard.ended == ENDED[:4]
    assert queue.counts["learned"] == 4


@pytest.mark.parametrize("failure", [StoreError("dead"), ValueError("a secret text")])
def test_failures_are_counted_and_the_next_are_learned(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    heard = Heard()

    def broken(ended: Ended) -> dict[str, int]:
        if ended is ENDED[0]:
            raise failure
        return heard(ended)

    queue = LearningQueue(broken)
    for ended in ENDED[:3]:
        queue.learn(ended)
    queue.close()
    assert "event=learning_failed" in caplog.text
    assert "secret" not in caplog.text
    assert heard.ended == ENDED[1:3]
    assert queue.counts == {"failed": 1, "learned": 2, "credited": 4}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_closing_does_not_wait_for_a_sink_that_hangs(count: int) -> None:
    """With nothing, something and all there is room for waiting behind it."""
    begun, go_on = threading.Event(), threading.Event()
    heard = Heard()

    def hanging(ended: Ended) -> dict[str, int]:
        begun.set()
        go_on.wait()
        return heard(ended)

    queue = LearningQueue(hanging, max_waiting=3)
    queue.learn(ENDED[0])
    assert begun.wait(timeout=30)
    for ended in ENDED[1:count]:
        queue.learn(ended)
    queue.close(timeout_s=0.01)
    assert heard.ended == []
    go_on.set()
    soon(lambda: heard.ended == ENDED[:count])
