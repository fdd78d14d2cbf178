"""Passes ended requests to a store off the hot path; drops them instead of blocking."""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from ...core.errors import DraftlineError
from ...core.interfaces import Ended

logger = logging.getLogger(__name__)

MAX_WAITING = 256
# Seconds that shutdown waits for a store that is out of reach.
CLOSE_S = 5.0


class LearningQueue:
    """Implements `core.interfaces.Learner`: calls `sink` for each request, in a thread of its own.

    `sink` returns the outcomes to add to `counts`. `dropped` counts requests that arrived while the
    queue was full, `failed` those for which `sink` raised.
    """

    def __init__(
        self, sink: Callable[[Ended], Mapping[str, int]], max_waiting: int = MAX_WAITING
    ) -> None:
        self._sink = sink
        self._waiting: queue.Queue[Ended | None] = queue.Queue(max_waiting)
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()
        # A daemon: requests still queued when the process ends are lost, which costs only speed.
        self._thread = threading.Thread(target=self._run, name="retrieval-learn", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> dict[str, int]:
        """Number of requests by outcome so far."""
        with self._counting:
            return dict(self._counts)

    def learn(self, ended: Ended) -> None:
        """Queue it; drop it when the queue is full."""
        try:
            self._waiting.put_nowait(ended)
        except queue.Full:
            is_first = self._count({"dropped": 1})
            level = logging.WARNING if is_first else logging.DEBUG
            logger.log(level, "event=learning_dropped namespace=%s", ended.namespace)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Drain the queue, then end the thread; returns after `timeout_s` at the latest."""
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (ended := self._waiting.get()) is not None:
            try:
                self._count(self._sink(ended))
            except Exception as error:  # noqa: BLE001 - whatever it is, the next one may be learned
                # The message of a foreign error may contain a part of the text.
                said = error if isinstance(error, DraftlineError) else type(error).__name__
                level = logging.WARNING if self._count({"failed": 1}) else logging.DEBUG
                logger.log(level, "event=learning_failed %s", said)

    def _count(self, more: Mapping[str, int]) -> bool:
        """Whether any of these is counted for the first time."""
        with self._counting:
            is_first = not self._counts.keys() >= more.keys()
            self._counts.update(more)
            return is_first
