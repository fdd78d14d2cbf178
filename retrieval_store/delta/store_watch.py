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
