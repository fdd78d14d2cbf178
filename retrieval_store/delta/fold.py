"""Folds a delta into one segment of learned texts for each namespace.

A fold rebuilds the segment of the last fold with the texts of the log, so a namespace has one such
segment. It has two while readers switch over. A crash at any point loses nothing: events leave the
log only when the manifest lists their segment. The next fold deletes what a crashed fold left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...core.errors import DamagedError, DraftlineError
from ..search.lookup import SHARED
from ..store import Manifest, SegmentStore, loss
from .damage import StoreWatch
from .delta_log import DeltaLog, Folded, LoggedEvent
from .settings import Fingerprint, LearningSettings
from .weighted_texts import WeightedTexts, folded_texts, learned_segment


class Folder:
    """Folds the namespaces of one log that are due. Every method raises `StoreError`.

    It folds nothing into a store that has lost its data, since the little it would hold then could
    pass for its whole content.

    watch  the last manifests of the store; None: those that this folder itself read
    """

    def __init__(
        self,
        store: SegmentStore,
        log: DeltaLog,
        fingerprint: Fingerprint,
        settings: LearningSettings,
        watch: StoreWatch | None = None,
    ) -> None:
        self._store = store
        self._watch = watch or StoreWatch(store)
        self._log = log
        self._fingerprint = fingerprint
        self._settings = settings

    def fold_due(self) -> list[str]:
        """Fold every namespace whose log is long or old enough; the names of those folded.

        A failure does not delay the other namespaces; it is raised after all are done.
        """
        self._watch.look()
        folded: list[str] = []
        failure: DraftlineError | None = None
        for namespace in self._log.epochs():
            try:
                if namespace != SHARED and self.fold(namespace):
                    folded.append(namespace)
            except DraftlineError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return folded

    def fold(self, namespace: str, *, must: bool = False) -> bool:
        """Fold one namespace if it is due, or `must` be; False too if another replica does it."""
        if not (must or self._is_due(self._log.read(namespace))):
            return False
        with self._log.locked(namespace) as held:
            # Another replica may have folded between the two readings.
            events = self._log.read(namespace) if held else []
            if not events or not (must or self._is_due(events)):
                return False
            manifest = self._watch.look()
            old = self._log.folded(namespace)
            if old.segment_id is not None and not manifest.written:
                raise loss(self._store.url)
            self._commit(namespace, self._collected(namespace, old, manifest), events, manifest)
        return True

    def _is_due(self, events: Sequence[LoggedEvent]) -> bool:
        if not events:
            return False
        tokens = sum(0 if (text := logged.event.tokens) is None else len(text) for logged in events)
        # The other half of the time is a margin for replicas that are down or busy.
        is_old = self._log.now() - events[0].time > self._settings.log_seconds / 2
        settings = self._settings
        return is_old or tokens >= settings.fold_tokens or len(events) >= settings.fold_entries

    def _collected(self, namespace: str, folded: Folded, manifest: Manifest) -> Folded:
        """The record of the last fold, its garbage deleted."""
        garbage = [name for name in folded.garbage if name != folded.segment_id]
        self._delete(namespace, garbage, manifest)
        return replace(folded, garbage=())

    def _commit(
        self, namespace: str, old: Folded, events: Sequence[LoggedEvent], manifest: Manifest
    ) -> None:
        now, up_to = self._log.now(), events[-1].position
        texts = self._texts(namespace, old, events, now)
        new = None
        if len(texts):
            segment = learned_segment(texts.documents(now), self._fingerprint)
            new = segment.segment_id
            self._log.fold(namespace, replace(old, garbage=(new,)))
            self._store.change(namespace, add=[segment], follows=manifest)
        gone = () if old.segment_id in (None, new) else (old.segment_id,)
        self._log.fold(namespace, Folded(new, now, texts.weights(now), gone), up_to)
        self._delete(namespace, gone, manifest)

    def _delete(self, namespace: str, segment_ids: Sequence[str], manifest: Manifest) -> None:
        if segment_ids:
            self._store.change(namespace, remove=segment_ids, follows=manifest)

    def _texts(
        self, namespace: str, old: Folded, events: Sequence[LoggedEvent], now: float
    ) -> WeightedTexts:
        try:
            texts = folded_texts(self._store, namespace, old, self._settings, now)
        except DamagedError:
            # The segment is replaced by this fold.
            self._log.damage.add(namespace, "folded texts")
            texts = WeightedTexts(self._settings.folded_tokens, self._settings.half_life)
        for logged in events:
            tokens = logged.event.tokens
            if tokens is None or self._fingerprint.takes(tokens):
                texts.apply(logged.event, min(logged.time, now))
        texts.prune(now)
        return texts
