"""Notices that a store has lost its data, so that nobody takes it for an empty one."""

from __future__ import annotations

from ..store import Manifest, SegmentStore, loss


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
        """What is stored now. Raises `StoreError` for as long as the store is without what it
        held, until an operator fills it again or accepts the loss."""
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
