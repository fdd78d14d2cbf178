"""Learned texts that are not folded yet, in memory: one small segment for each namespace."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from ...core.arrays import Int32
from ...core.errors import DamagedError, StoreError
from ..search.lookup import SHARED
from ..segment.segment import Segment
from ..store import SegmentStore
from .delta_log import DeltaLog
from .settings import Fingerprint, LearningSettings
from .weighted_texts import WeightedTexts, folded_texts, learned_segment

# After this many unreachable logs in one refresh, the remaining logs wait for the next refresh.
MAX_FAILURES = 3


class _Space:
    """The texts that one namespace learned, up to a position of its log.

    texts     not folded yet
    folded    folded texts: they are in the store's segments, and kept here to be credited
    is_stale  whether the segment lacks some of `texts`, or holds removed ones
    """

    __slots__ = ("epoch", "folded", "is_stale", "position", "texts")

    def __init__(self, epoch: str, texts: WeightedTexts, folded: WeightedTexts) -> None:
        self.epoch = epoch
        self.folded = folded
        self.is_stale = True
        self.position = ""
        self.texts = texts


class LiveDelta:
    """Follows a log. One thread calls `refresh`; any thread may read meanwhile.

    segments  namespace -> its texts; a new mapping after every change
    """

    def __init__(
        self,
        store: SegmentStore,
        log: DeltaLog,
        fingerprint: Fingerprint,
        settings: LearningSettings,
    ) -> None:
        self._store = store
        self._log = log
        self._fingerprint = fingerprint
        self._settings = settings
        self._spaces: dict[str, _Space] = {}
        self._changing = threading.Lock()
        self.segments: Mapping[str, Segment] = {}

    def is_known(self, namespace: str, digest: str) -> bool:
        """Whether a text of this digest was learned."""
        with self._changing:
            space = self._spaces.get(namespace)
            return space is not None and (digest in space.texts or digest in space.folded)

    def holding(self, namespace: str, runs: Iterable[Int32]) -> set[str]:
        """Digests of the namespace's texts that hold any of the runs."""
        with self._changing:
            space = self._spaces.get(namespace)
            if space is None:
                return set()
            kept = (space.texts, space.folded)
            return {digest for run in runs for texts in kept for digest in texts.holding(run)}

    def refresh(self) -> None:
        """Read what is new, and build the segments of namespaces that changed.

        A namespace whose log cannot be read stays as it is; the others are followed. Raises
        `StoreError` if logs are out of reach.
        """
        now = self._log.now()
        # Learned text must not reach the readers of `shared`, whatever its log holds.
        epochs = {name: mark for name, mark in self._log.epochs().items() if name != SHARED}
        failures: list[StoreError] = []
        for namespace, epoch in epochs.items():
            try:
                self._follow(namespace, epoch, now)
            except DamagedError:
                self._log.damage.add(namespace, "log")
            except StoreError as error:
                failures.append(error)
                # Each of them may have taken the store's whole timeout.
                if len(failures) == MAX_FAILURES:
                    break
        gone = self._spaces.keys() - epochs.keys()
        with self._changing:
            for namespace in gone:
                del self._spaces[namespace]
        stale = [name for name, space in self._spaces.items() if space.is_stale]
        if gone or stale:
            kept = {name: old for name, old in self.segments.items() if name in epochs}
            self.segments = kept | {name: self._build(self._spaces[name], now) for name in stale}
        if failures:
            raise failures[0]

    def _follow(self, namespace: str, epoch: str, now: float) -> None:
        space = self._spaces.get(namespace)
        if space is None or space.epoch != epoch:
            texts = WeightedTexts(self._settings.delta_tokens, self._settings.half_life)
            space = _Space(epoch, texts, self._folded(namespace, now))
        events = self._log.read(namespace, space.position)
        with self._changing:
            for logged in events:
                # The content of a log is untrusted.
                if logged.event.tokens is None or self._fingerprint.takes(logged.event.tokens):
                    space.texts.apply(logged.event, min(logged.time, now))
                space.position, space.is_stale = logged.position, True
            space.is_stale |= space.texts.prune(now, now - self._settings.log_seconds)
            self._spaces[namespace] = space

    def _folded(self, namespace: str, now: float) -> WeightedTexts:
        folded = self._log.folded(namespace)
        try:
            return folded_texts(self._store, namespace, folded, self._settings, now)
        except DamagedError:
            self._log.damage.add(namespace, "folded texts")
            return WeightedTexts(self._settings.folded_tokens, self._settings.half_life)

    def _build(self, space: _Space, now: float) -> Segment:
        space.is_stale = False
        return learned_segment(space.texts.documents(now), self._fingerprint)
