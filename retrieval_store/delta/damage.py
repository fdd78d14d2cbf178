"""Counts damaged entries of a store, which are skipped and logged once, and detects lost data."""

from __future__ import annotations

import logging
import threading

from ..store import Manifest, SegmentStore, loss

logger = logging.getLogger(__name__)

# Beyond this number, damaged places of one namespace are only counted.
MAX_PLACES = 1024


class DamageCount:
    """Counts entries and texts that were skipped because they are damaged; thread-safe to read."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._places: dict[str, set[str]] = {}
        self._total = 0
        self._num_taken = 0

    @property
    def total(self) -> int:
        """Number of damaged places so far."""
        return self._total

    def of(self, namespace: str) -> int:
        """Number of damaged places in one namespace."""
        with self._changing:
            return len(self._places.get(namespace, ()))

    def add(self, namespace: str, place: str) -> None:
        """Count the damaged entry or text `place`, a name within the namespace; once each."""
        with self._changing:
            is_first = namespace not in self._places
            places = self._places.setdefault(namespace, set())
            if place in places or len(places) >= MAX_PLACES:
                return
            places.add(place)
            self._total += 1
        level = logging.WARNING if is_first else logging.DEBUG
        logger.log(level, "event=learned_data_damaged namespace=%s", namespace)

    def take(self) -> int:
        """Number of damaged places that are new since the last call."""
        with self._changing:
            taken, self._num_taken = self._num_taken, self._total
            return self._total - taken


class StoreWatch:
    """Remembers the last manifest, to detect the loss of a store's data.

    followed  the last manifest that follows from the ones before it
    is_lost   whether the store had lost data when it was last read
    """

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self.followed = Manifest()
        self.is_lost = False

    def look(self) -> Manifest:
        """Read the manifest, and check whether the store has lost its data.

        Raises `StoreError` after a loss, until an operator fills the store again or accepts it.
        """
        manifest = self._store.manifest()
        self.is_lost = manifest.is_lost_since(self.followed)
        if self.is_lost:
            raise loss(self._store.url)
        self.followed = manifest
        return manifest

    def require(self) -> None:
        """Raise `StoreError` if the last look found a loss."""
        if self.is_lost:
            raise loss(self._store.url)
