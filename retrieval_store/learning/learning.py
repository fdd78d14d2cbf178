"""Learning into one store for one model.

See docs/retrieval.md, "Learning".
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping

from ...core.arrays import Int32
from ...core.errors import ConfigError
from ...core.interfaces import CREDITED, DAMAGED, Ended
from ..delta.damage import StoreWatch
from ..delta.delta_log import MAX_TOKENS, DeltaEvent, DeltaLog, text_digest
from ..delta.fingerprint import Fingerprint
from ..delta.fold import Folder
from ..delta.live_delta import LiveDelta
from ..delta.settings import LearningSettings
from ..search.lookup import MIN_CONTEXT, SHARED
from ..segment.segment import Segment
from ..store import SegmentStore, check_namespace

# A shorter text continues no context.
MIN_TOKENS = MIN_CONTEXT + 1
# Runs of one request that are searched in learned texts; the longest are used.
MAX_RUNS = 32


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
