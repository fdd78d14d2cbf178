"""Serves lookups from memory while the store behind it changes, or dies and comes back."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..core.errors import StoreError
from ..core.lookup import Subtree
from ..core.types import Int32
from .lookup import SegmentLookup
from .segment import Segment
from .store import Manifest, SegmentStore

logger = logging.getLogger(__name__)

Held = dict[tuple[str, str], Segment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What every segment must be built for; None is not checked."""

    tokenizer_hash: str | None = None
    model_hash: str | None = None
    vocab_size: int | None = None


class RetrievalService:
    """Implements `core.lookup.Lookup` over a store, always from what is in memory.

    `refresh` loads what changed and then replaces the lookup as a whole, so no lookup waits for
    it or sees half of it. `start` does so in a thread whenever the store changes; while the store
    is out of reach, or has lost its data, what was loaded last goes on being served.
    """

    def __init__(
        self, store: SegmentStore, expected: Expected | None = None, poll_seconds: float = 1.0
    ) -> None:
        self._store = store
        self._expected = expected or Expected()
        self._poll_seconds = poll_seconds
        self._manifest: Manifest | None = None
        self._held: Held = {}
        self._lookup = SegmentLookup({})
        self._refreshing = threading.Lock()
        self._stopped = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def version(self) -> str:
        """Version of the manifest being served; empty while none is served as a whole."""
        return "" if self._manifest is None else self._manifest.version

    def lookup(
        self, contexts: Sequence[Int32], namespaces: Sequence[str], max_nodes: Sequence[int]
    ) -> list[Subtree]:
        """One subtree a context, in order; see `core.lookup.Lookup`. Never touches the store."""
        return self._lookup.lookup(contexts, namespaces, max_nodes)

    def refresh(self) -> bool:
        """Serve what the store holds now; True if that changed anything.

        Raises `StoreError`, and serves on as before, if the store is out of reach or has lost its
        data. Raises it after everything else was taken over if a segment is corrupt or was built
        for another tokenizer, model or vocabulary; the next call tries that segment again.
        """
        with self._refreshing:
            manifest = self._store.manifest()
            if self._manifest is not None and manifest.version == self._manifest.version:
                return False
            if self._held and not manifest.written:
                raise StoreError(f"{self._store.url}: has lost its data; build the corpora again")
            held, failure = self._load_all(manifest)
            grouped: dict[str, list[Segment]] = {}
            for (namespace, _), segment in held.items():
                grouped.setdefault(namespace, []).append(segment)
            self._lookup = SegmentLookup(grouped)
            self._held = held
            # Without a manifest the next call loads again, even if the store goes back.
            self._manifest = manifest if failure is None else None
            if failure is not None:
                raise failure
            return True

    def start(self) -> None:
        """Follow the store in a thread until `stop`; loads nothing by itself yet."""
        self._watcher = threading.Thread(target=self._watch, name="retrieval-watch", daemon=True)
        self._watcher.start()

    def stop(self) -> None:
        """End the thread (at most `poll_seconds` and a store timeout) and close the store."""
        self._stopped.set()
        if self._watcher is not None:
            self._watcher.join()
        self._store.close()

    def _load_all(self, manifest: Manifest) -> tuple[Held, StoreError | None]:
        """The segments that could be had, and the first failure."""
        held: Held = {}
        failure: StoreError | None = None
        for namespace in sorted(manifest.sizes):
            for segment_id in manifest.segment_ids(namespace):
                key = (namespace, segment_id)
                try:
                    held[key] = self._held.get(key) or self._load(namespace, segment_id)
                except StoreError as error:
                    failure = failure or error
        return held, failure

    def _load(self, namespace: str, segment_id: str) -> Segment:
        segment = self._store.get(namespace, segment_id)
        segment.require(f"{self._store.url} {namespace}/{segment_id}", **asdict(self._expected))
        return segment

    def _watch(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                self._store.wait_for_change(self._poll_seconds)
                if self.refresh() or failures:
                    logger.info("event=retrieval_store_followed version=%s", self.version)
                failures = 0
            except Exception as error:
                # Whatever it is, the data in memory is served on and the store is tried again.
                level = logging.DEBUG if failures else logging.WARNING
                expected = isinstance(error, StoreError)
                logger.log(level, "event=retrieval_store_failed %s", error, exc_info=not expected)
                failures += 1
                # Full jitter, so that replicas do not come back all at once.
                ceiling = min(30.0, self._poll_seconds * 2 ** min(failures, 8))
                self._stopped.wait(random.uniform(0.0, ceiling))
