"""Hands ended requests to a store off the hot path, and drops them rather than wait."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ..core.errors import DraftlineError
from ..core.learner import Ended

logger = logging.getLogger(__name__)

MAX_WAITING = 256


class LearningQueue:
    """Implements `core.learner.Learner`: calls `sink` for each request, in a thread of its own.

    dropped  requests that came while the queue was full
    failed   requests for which `sink` raised
    """

    def __init__(self, sink: Callable[[Ended], None], max_waiting: int = MAX_WAITING) -> None:
        self._sink = sink
        self._waiting: queue.Queue[Ended | None] = queue.Queue(max_waiting)
        self.dropped = 0
        self.failed = 0
        # A daemon: what waits when the process ends is lost, and costs speed only.
        self._thread = threading.Thread(target=self._run, name="retrieval-learn", daemon=True)
        self._thread.start()

    def learn(self, ended: Ended) -> None:
        """Queue it; drop it when the queue is full."""
        try:
            self._waiting.put_nowait(ended)
        except queue.Full:
            level = logging.DEBUG if self.dropped else logging.WARNING
            logger.log(level, "event=learning_dropped namespace=%s", ended.namespace)
            self.dropped += 1

    def close(self) -> None:
        """Hand on what waits, then end the thread."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (ended := self._waiting.get()) is not None:
            try:
                self._sink(ended)
            except DraftlineError as error:
                level = logging.DEBUG if self.failed else logging.WARNING
                logger.log(level, "event=learning_failed %s", error)
                self.failed += 1
