from __future__ import annotations

from collections.abc import Sequence

import pytest
from draftline.cluster.retrieval import RETRY, ReplicatedLookup
from draftline.core.arrays import Int32
from draftline.core.errors import CapacityError, DrafterError, DraftlineError
from draftline.core.interfaces import Subtree
from support.fakes.fake_lookup import CountingLookup
from support.inputs.segments import context

ARGUMENTS = ([context(1, 2), context(3)], ["n", "n"], [4, 4])


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeReplica:
    """Answers, or takes `seconds` and fails."""

    def __init__(self, clock: Clock) -> None:
        self.failure: DraftlineError | None = None
        self.seconds: float | None = 0.0
        self.timeouts: list[float | None] = []
        self._clock = clock

    def lookup(
        self,
        contexts: Sequence[Int32],
        namespaces: Sequence[str],
        max_nodes: Sequence[int],
        *,
        timeout_s: float | None = None,
    ) -> list[Subtree]:
        self.timeouts.append(timeout_s)
        assert timeout_s is not None
        self._clock.now += timeout_s if self.seconds is None else self.seconds
        if self.seconds is None:
            raise DrafterError("hangs")
        if self.failure is not None:
            raise self.failure
        return CountingLookup(100).lookup(contexts, namespaces, max_nodes)

    def close(self) -> None:
        self.timeouts.clear()

    @property
    def num_asked(self) -> int:
        return len(self.timeouts)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def replicas(clock: Clock) -> list[FakeReplica]:
    return [FakeReplica(clock) for _ in range(3)]


@pytest.fixture
def lookup(replicas: list[FakeReplica], clock: Clock) -> ReplicatedLookup:
    return ReplicatedLookup(replicas, timeout_s=0.3, clock=clock)


def sizes(found: Sequence[Subtree]) -> list[int]:
    return [len(subtree.tokens) for subtree in found]


def test_batches_go_round(lookup: ReplicatedLookup, replicas: list[FakeReplica]) -> None:
    for _ in range(9):
        assert sizes(lookup.lookup(*ARGUMENTS)) == [4, 4]
    assert [replica.num_asked for replica in replicas] == [3, 3, 3]


def test_a_dead_replica_loses_nothing_is_left_out_and_tried_again(
    lookup: ReplicatedLookup, replicas: list[FakeReplica], clock: Clock
) -> None:
    replicas[1].failure = DrafterError("dead")
    for _ in range(30):
        assert sizes(lookup.lookup(*ARGUMENTS)) == [4, 4]
    assert replicas[1].num_asked == 1
    replicas[1].failure = None
    clock.now += RETRY.first_delay_s
    for _ in range(30):
        lookup.lookup(*ARGUMENTS)
    assert replicas[1].num_asked == 11


def test_one_that_hangs_leaves_time_for_the_others(
    lookup: ReplicatedLookup, replicas: list[FakeReplica], clock: Clock
) -> None:
    replicas[0].seconds = replicas[1].seconds = None
    assert sizes(lookup.lookup(*ARGUMENTS)) == [4, 4]
    assert clock.now <= 0.3
    for replica in replicas:
        assert replica.timeouts == [pytest.approx(0.1)]


def test_one_without_time_is_passed_over_and_stays(
    lookup: ReplicatedLookup, replicas: list[FakeReplica]
) -> None:
    replicas[0].failure = CapacityError("late")
    for _ in range(6):
        assert sizes(lookup.lookup(*ARGUMENTS)) == [4, 4]
    assert [replica.num_asked for replica in replicas] == [2, 4, 2]


def test_if_none_has_time_nothing_is_found(
    lookup: ReplicatedLookup, replicas: list[FakeReplica]
) -> None:
    for replica in replicas:
        replica.failure = CapacityError("late")
    assert sizes(lookup.lookup(*ARGUMENTS)) == [0, 0]
    replicas[2].failure = DrafterError("dead")
    assert sizes(lookup.lookup(*ARGUMENTS)) == [0, 0]


def test_one_that_was_left_out_is_asked_when_all_others_fail(
    lookup: ReplicatedLookup, replicas: list[FakeReplica]
) -> None:
    replicas[0].failure = DrafterError("dead")
    lookup.lookup(*ARGUMENTS)
    replicas[0].failure = None
    for replica in replicas[1:]:
        replica.failure = DrafterError("dead")
    assert sizes(lookup.lookup(*ARGUMENTS)) == [4, 4]
    assert replicas[0].num_asked == 2


def test_if_all_fail_the_drafter_fails_and_comes_back_at_once(
    lookup: ReplicatedLookup, replicas: list[FakeReplica]
) -> None:
    for replica in replicas:
        replica.failure = DrafterError("dead")
    for _ in range(3):
        with pytest.raises(DrafterError, match="dead"):
            lookup.lookup(*ARGUMENTS)
    for replica in replicas:
        replica.failure = None
    assert sizes(lookup.lookup(*ARGUMENTS)) == [4, 4]
    lookup.close()
