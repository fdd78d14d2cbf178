"""What is damaged in a store is counted, passed over and logged once; a lost store is noticed."""

from __future__ import annotations

import logging
import threading

from ..store import Manifest, SegmentStore, loss

logger = logging.getLogger(__name__)

# Of one namespace more are not told apart.
MAX_PLACES = 1024


class DamageCount:
    """Entries and texts that were passed over because they are damaged; any thread may ask."""

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
    """Remembers the manifest that was there.

    followed  the last one that came out of those before it
    is_lost   whether the store held something else at the last look
    """

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self.followed = Manifest()
        self.is_lost = False

    def look(self) -> Manifest:
        """Read the manifest, and notice whether the store has lost what it held.

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
