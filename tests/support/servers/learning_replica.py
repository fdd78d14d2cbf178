"""One replica of a service that learns, and waiting for what its threads do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from draftline.core.interfaces import Ended
from draftline.retrieval_store.delta.delta_log import DeltaLog
from draftline.retrieval_store.delta.fold import Folder
from draftline.retrieval_store.delta.settings import Fingerprint, LearningSettings
from draftline.retrieval_store.learning import LiveLearning
from draftline.retrieval_store.serving.open_store import open_delta_log, open_store
from draftline.retrieval_store.serving.service import RetrievalService
from support.contracts.delta_log_contract import FINGERPRINT
from support.inputs.segments import context


class Replica:
    """One service over a store, with the parts that tests look at."""

    def __init__(
        self,
        url: str,
        settings: LearningSettings | None = None,
        off: Sequence[str] = (),
        fingerprint: Fingerprint = FINGERPRINT,
        poll_seconds: float = 0.1,
    ) -> None:
        settings = settings or LearningSettings()
        self.store = open_store(url)
        self.log: DeltaLog = open_delta_log(url, fingerprint, settings)
        self.learning = LiveLearning(self.store, self.log, fingerprint, settings, off)
        self.service = RetrievalService(self.store, None, poll_seconds, learning=self.learning)
        self.folder = Folder(self.store, self.log, fingerprint, settings, self.learning.watch)

    def learn(
        self, namespace: str, *tokens: int, accepted: tuple[tuple[int, int], ...] = ()
    ) -> None:
        """As a drafter would when a request ends."""
        self.service.learn(Ended(namespace, np.array(tokens, dtype=np.int32), accepted))

    def answer(self, namespace: str, *tokens: int) -> set[int]:
        """The tokens of a lookup's first level, without reading the store."""
        subtree = self.service.lookup([context(*tokens)], [namespace], [8])[0]
        return set(subtree.tokens[subtree.parents == -1].tolist())

    def fresh_answer(self, namespace: str, *tokens: int) -> set[int]:
        """The same after a reading."""
        self.service.refresh()
        return self.answer(namespace, *tokens)


def soon(is_true: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    pause = threading.Event()
    for _ in range(600):
        if is_true():
            return
        pause.wait(0.05)
    raise AssertionError("it never came true")
