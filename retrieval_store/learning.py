"""Learning into one store for one model: ended requests, who is excluded, and erasure.

See docs/retrieval.md, "Learning".
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from ..core.arrays import Int32
from ..core.errors import ConfigError, DraftlineError, StoreError
from ..core.interfaces import CREDITED, DAMAGED, Ended
from .delta.damage import StoreWatch
from .delta.delta_log import MAX_TOKENS, DeltaEvent, DeltaLog, text_digest
from .delta.fold import Folder
from .delta.live_delta import LiveDelta
from .delta.settings import Fingerprint, LearningSettings
from .search.lookup import MIN_CONTEXT, SHARED
from .segment.segment import Segment
from .store import SegmentStore, check_namespace

# A shorter text continues no context.
MIN_TOKENS = MIN_CONTEXT + 1
# Runs of one request that are searched in learned texts; the longest are used.
MAX_RUNS = 32
logger = logging.getLogger(__name__)
MAX_WAITING = 256
# Seconds that shutdown waits for a store that is out of reach.
CLOSE_S = 5.0


class LearningPolicy(Protocol):
    """The namespaces excluded from learning, kept in the store itself.

    Every method raises `StoreError` if the store is out of reach. Logs check the policy atomically
    with each append, so nothing is appended once `switch` has returned. Earlier learned text stays.
    """

    def off(self) -> frozenset[str]:
        """Namespaces of which nothing is learned."""
        ...

    def switch(self, namespace: str, *, learns: bool) -> None:
        """Forbid learning of a namespace, or allow it again. Raises `ConfigError` as
        `check_learned` does."""
        ...

    def close(self) -> None:
        """Free connections."""
        ...


def check_learned(namespace: str) -> None:
    """Raise `ConfigError` for an unsafe name, and for `shared`, which is never learned."""
    check_namespace(namespace)
    if namespace == SHARED:
        raise ConfigError("namespace", f"nothing is ever learned of {SHARED}; name a tenant")


class NamespaceEraser(Protocol):
    """Deletes namespaces. Both methods raise `StoreError` if the store is out of reach."""

    def erase(self, namespace: str) -> None:
        """Delete segments, learned texts and their records at once, without a grace period.

        Waits for a running fold, which would write again, and notifies readers.
        """
        ...

    def remains(self, namespace: str) -> list[str]:
        """Names of keys, entries and files of the namespace, sorted."""
        ...

    def close(self) -> None:
        """Free connections."""
        ...


def forget_namespace(
    eraser: NamespaceEraser, namespace: str, policy: LearningPolicy | None = None
) -> int:
    """Erase a namespace, verify that nothing is left, and return how many things were deleted.

    With `policy`, the namespace is also excluded from learning, so that requests which end later
    add nothing. Replicas drop its content at their next refresh. Raises `ConfigError` for an unsafe
    name, and `StoreError` naming what is left.
    """
    check_namespace(namespace)
    if policy is not None:
        policy.switch(namespace, learns=False)
    before = eraser.remains(namespace)
    eraser.erase(namespace)
    left = eraser.remains(namespace)
    if left:
        raise StoreError(
            f"namespace {namespace}: {', '.join(left[:4])} is there again; stop what writes to it "
            "and forget it once more"
        )
    return len(before)


class LiveLearning:
    """Learns ended requests of all namespaces but `shared`, those in `off`, and those that the
    store's `LearningPolicy` forbids.

    counts  by outcome, see `core.interfaces.OUTCOMES`; `credited`: texts that were used; `damaged`:
            log entries that were skipped
    watch   of the store; nothing is learned or folded after the store lost its data, since that
            includes the learning policy
    """

    def __init__(
        self,
        store: SegmentStore,
        log: DeltaLog,
        fingerprint: Fingerprint,
        settings: LearningSettings | None = None,
        off: Collection[str] = (),
    ) -> None:
        settings = settings or LearningSettings()
        for namespace in off:
            check_namespace(namespace)
        self._log = log
        self._off = frozenset(off)
        self.fingerprint = fingerprint
        self._delta = LiveDelta(store, log, fingerprint, settings)
        self.watch = StoreWatch(store)
        self._folder = Folder(store, log, fingerprint, settings, self.watch)
        self._counting = threading.Lock()
        self.counts: Counter[str] = Counter()

    @property
    def segments(self) -> Mapping[str, Segment]:
        """Namespace -> segment of its texts that are not folded yet; a new mapping after every
        change."""
        return self._delta.segments

    @property
    def num_damaged(self) -> int:
        """Number of entries and texts that were skipped because they are damaged."""
        return self._log.damage.total

    def refresh(self) -> None:
        """Read what all replicas learned. Raises `StoreError`."""
        self._delta.refresh()

    def fold_due(self) -> list[str]:
        """Fold the namespaces that are due and return their names. Raises `StoreError`."""
        return self._folder.fold_due()

    def learn(self, ended: Ended) -> dict[str, int]:
        """Write one ended request to the log, or refuse it; returns the outcomes to add to
        `counts`.

        A known text only gains weight, as do the texts that contain a run which the target
        accepted. Raises `StoreError`.
        """
        added = self._learn(ended)
        if num_damaged := self._log.damage.take():
            added |= {DAMAGED: num_damaged}
        with self._counting:
            self.counts.update(added)
        return added

    def close(self) -> None:
        """Free the log's connections."""
        self._log.close()

    def _learn(self, ended: Ended) -> dict[str, int]:
        reason = self._refusal(ended)
        if reason is not None:
            return {reason: 1}
        self.watch.require()
        digest = text_digest(ended.tokens)
        is_known = self._delta.is_known(ended.namespace, digest)
        event = DeltaEvent(digest, 1.0, None if is_known else ended.tokens)
        useful = self._delta.holding(ended.namespace, _runs(ended)) - {digest}
        credits = [DeltaEvent(name, 1.0) for name in sorted(useful)]
        if not self._log.append(ended.namespace, [event, *credits]):
            return {"off": 1}
        outcome = "repeated" if is_known else "learned"
        return {outcome: 1, CREDITED: len(credits)} if credits else {outcome: 1}

    def _refusal(self, ended: Ended) -> str | None:
        try:
            check_namespace(ended.namespace)
        except ConfigError:
            return "unfit"
        if ended.namespace == SHARED:
            return "shared"
        if ended.namespace in self._off:
            return "off"
        is_fit = MIN_TOKENS <= len(ended.tokens) <= MAX_TOKENS and self.fingerprint.takes(
            ended.tokens
        )
        return None if is_fit else "unfit"


def _runs(ended: Ended) -> list[Int32]:
    """The runs that the target accepted, each with the context of its lookup."""
    longest = sorted(ended.accepted, key=lambda run: run[0] - run[1])[:MAX_RUNS]
    runs = [ended.tokens[max(start - MIN_CONTEXT, 0) : stop] for start, stop in longest]
    return [run for run in runs if len(run) >= MIN_TOKENS]


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
