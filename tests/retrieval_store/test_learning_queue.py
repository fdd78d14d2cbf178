from __future__ import annotations

import threading

from draftline.core.errors import StoreError
from draftline.core.learner import Ended
from draftline.retrieval_store.learning_queue import LearningQueue
from support.segments import context

ENDED = [Ended(f"n{index}", context(1, 2, 3)) for index in range(8)]


def test_all_are_handed_on_in_order_before_it_closes() -> None:
    heard: list[Ended] = []
    queue = LearningQueue(heard.append)
    for ended in ENDED:
        queue.learn(ended)
    queue.close()
    assert heard == ENDED
    assert (queue.dropped, queue.failed) == (0, 0)


def test_a_full_queue_drops_and_counts_and_never_waits() -> None:
    begun, go_on = threading.Event(), threading.Event()
    heard: list[Ended] = []

    def slow(ended: Ended) -> None:
        heard.append(ended)
        begun.set()
        go_on.wait()

    queue = LearningQueue(slow, max_waiting=3)
    queue.learn(ENDED[0])
    assert begun.wait(timeout=30)
    for ended in ENDED[1:]:
        queue.learn(ended)
    assert queue.dropped == 4
    go_on.set()
    queue.close()
    assert heard == ENDED[:4]


def test_failures_are_counted_and_the_next_are_learned() -> None:
    heard: list[Ended] = []

    def broken(ended: Ended) -> None:
        if ended is ENDED[0]:
            raise StoreError("dead")
        heard.append(ended)

    queue = LearningQueue(broken)
    for ended in ENDED[:3]:
        queue.learn(ended)
    queue.close()
    assert (queue.failed, heard) == (1, ENDED[1:3])
