"""What the learning policy must do over any store; a test class per store inherits it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from draftline.core.errors import ConfigError
from draftline.core.proposals import Commit, DraftRequest
from draftline.drafters.retrieval import RetrievalDrafter, RetrievalOptions
from draftline.retrieval_store.learning import LearningPolicy, LearningQueue, forget_namespace
from draftline.retrieval_store.serving.open_store import open_eraser, open_policy
from support.contracts.delta_log_contract import OTHER_MODEL, learned
from support.servers.learning_replica import Replica, soon


@contextmanager
def repeating(*actions: Callable[[], object]) -> Iterator[None]:
    """Each in a thread of its own, again and again until the context ends."""
    stop = threading.Event()

    def repeat(action: Callable[[], object]) -> None:
        while not stop.is_set():
            action()

    threads = [threading.Thread(target=repeat, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class OpenRequest:
    """A request of a drafter that learns into a replica, open until `end`."""

    def __init__(self, replica: Replica, namespace: str) -> None:
        self._queue = LearningQueue(replica.service.learn)
        options = RetrievalOptions(learn=True)
        self.drafter = RetrievalDrafter(replica.service, "retrieval", options, self._queue)
        prompt = np.array([1, 2], dtype=np.int32)
        self.drafter.open(DraftRequest("r", prompt, 2, 0.0, 0, namespace=namespace))
        self.drafter.observe([Commit("r", 2, np.array([3, 4], dtype=np.int32))])

    def end(self) -> dict[str, int]:
        """What became of it."""
        self.drafter.close("r")
        self._queue.close()
        return {name: count for name, count in self.drafter.learning_counts.items() if count}


class PolicyContract:
    @pytest.fixture
    def policy(self, url: str) -> LearningPolicy:
        # A store that was written before.
        Replica(url).learn("before", 1, 2, 3)
        return open_policy(url, writes=True)

    def test_off_and_on_again_for_all_replicas(self, url: str, policy: LearningPolicy) -> None:
        one, two = Replica(url), Replica(url)
        one.learn("tenant", 1, 2, 3)
        policy.switch("tenant", learns=False)
        policy.switch("second", learns=False)
        policy.switch("second", learns=False)
        assert open_policy(url).off() == {"tenant", "second"}
        for replica in (one, two):
            replica.learn("tenant", 1, 2, 4)
            replica.learn("tenant2", 1, 2, 5)
            assert replica.learning.counts["off"] == 1
        # What was learned before stays.
        assert two.fresh_answer("tenant", 1, 2) == {3}
        assert two.answer("tenant2", 1, 2) == {5}
        policy.switch("tenant", learns=True)
        policy.switch("tenant", learns=True)
        assert policy.off() == {"second"}
        one.learn("tenant", 1, 2, 6)
        assert two.fresh_answer("tenant", 1, 2) == {3, 6}

    def test_it_holds_for_every_model(self, url: str, policy: LearningPolicy) -> None:
        policy.switch("tenant", learns=False)
        other = Replica(url, fingerprint=OTHER_MODEL)
        assert not other.log.append("tenant", [learned(1, 2, 3)])
        assert other.log.epochs() == {}

    @pytest.mark.parametrize("name", ["", "*", "..", "a/b", "shared"])
    def test_only_tenants_have_a_policy(self, policy: LearningPolicy, name: str) -> None:
        with pytest.raises(ConfigError, match="namespace"):
            policy.switch(name, learns=False)
        assert policy.off() == set()

    def test_nothing_is_appended_once_it_is_off(self, url: str, policy: LearningPolicy) -> None:
        """However many append at that moment."""
        replicas = [Replica(url) for _ in range(3)]

        def append(replica: Replica) -> Callable[[], object]:
            return lambda: replica.log.append("tenant", [learned(1, 2, 3)])

        def positions() -> list[str]:
            return [logged.position for logged in replicas[0].log.read("tenant")]

        with repeating(*map(append, replicas)):
            for turn in range(5):
                known = len(positions())
                soon(lambda known=known: len(positions()) > known)
                policy.switch("tenant", learns=False)
                before = positions()
                # Their next attempts come meanwhile.
                policy.switch("other", learns=bool(turn % 2))
                assert positions() == before
                policy.switch("tenant", learns=True)

    def test_requests_that_end_after_a_forgetting_are_not_learned(
        self, url: str, policy: LearningPolicy
    ) -> None:
        one, two = Replica(url), Replica(url)
        one.learn("tenant", 1, 2, 5)
        opened = [OpenRequest(replica, "tenant") for replica in (one, two)]
        eraser = open_eraser(url)
        assert forget_namespace(eraser, "tenant", policy) > 0
        assert [request.end() for request in opened] == [{"off": 1}] * 2
        assert eraser.remains("tenant") == []
        assert two.fresh_answer("tenant", 1, 2) == set()
        assert policy.off() == {"tenant"}
        # Until somebody allows it.
        policy.switch("tenant", learns=True)
        assert OpenRequest(one, "tenant").end() == {"learned": 1}
        assert two.fresh_answer("tenant", 1, 2) == {3}

    def test_learning_may_be_kept_over_a_forgetting(self, url: str, policy: LearningPolicy) -> None:
        replica = Replica(url)
        opened = OpenRequest(replica, "tenant")
        forget_namespace(open_eraser(url), "tenant")
        assert opened.end() == {"learned": 1}
        assert replica.fresh_answer("tenant", 1, 2) == {3}
        assert policy.off() == set()

    def test_forgetting_while_all_learn_leaves_nothing(
        self, url: str, policy: LearningPolicy
    ) -> None:
        """Appends, folds and the forgetting at once; what is left is looked at when all ended."""
        replica, values = Replica(url), itertools.cycle(range(32))
        eraser = open_eraser(url)
        with repeating(
            lambda: replica.learn("tenant", 1, 2, next(values)),
            lambda: replica.folder.fold("tenant", must=True),
        ):
            soon(lambda: replica.learning.counts["learned"] > 0)
            forget_namespace(eraser, "tenant", policy)
            soon(lambda: replica.learning.counts["off"] > 0)
        assert eraser.remains("tenant") == []
