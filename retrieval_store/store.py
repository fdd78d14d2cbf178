"""The interface of stores: segments named by content, in namespaces, listed by one manifest."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..core.errors import ConfigError, DamagedError, StoreError
from .segment.segment import Segment

SEGMENT_ID = re.compile(r"[0-9a-f]{32}")
NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """All segments of a store at one moment.

    sizes     namespace -> segment id -> bytes; no empty namespaces
    written   False if nothing was ever stored here: a store that is new, or that lost its data
    origin    a random id if learning alone created this store; empty once an operator wrote to it
    is_broken True if segments exist without a manifest, which means that it was lost
    damaged   entry -> why it cannot be read; it may have named a segment
    """

    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    written: bool = False
    origin: str = ""
    is_broken: bool = False
    damaged: Mapping[str, DamagedError] = field(default_factory=dict, compare=False)

    @property
    def version(self) -> str:
        """A digest of the content: equal content, equal version."""
        content = json.dumps(
            [self.written, self.origin, self.sizes, sorted(self.damaged)], sort_keys=True
        )
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def segment_ids(self, namespace: str) -> list[str]:
        """Ids of a namespace's segments, sorted."""
        return sorted(self.sizes.get(namespace, {}))

    def is_lost_since(self, before: Manifest) -> bool:
        """Whether the content of `before` disappeared without an operator's change.

        A store that learning alone recreated after a loss does not count as the old one.
        """
        if self.is_broken:
            return True
        is_another = self.origin not in ("", before.origin)
        return before.written and (not self.written or is_another)

    def origin_after(self, follows: Manifest | None, url: str, *, adds: bool = True) -> str:
        """`origin` after a change, see `SegmentStore.change`. Raises `StoreError` for a loss."""
        if follows is None:
            return "" if adds else self.origin
        if self.is_lost_since(follows):
            raise loss(url)
        return self.origin if self.written else secrets.token_hex(8)


class SegmentStore(Protocol):
    """Keeps segments. Every method raises `StoreError` if the store is out of reach.

    Readers see the manifest before or after a change, never between. A deleted segment can still be
    read for at least a minute.
    """

    @property
    def url(self) -> str:
        """The name of the store in messages, without secrets."""
        ...

    def manifest(self) -> Manifest:
        """The segments stored now."""
        ...

    def get(self, namespace: str, segment_id: str) -> Segment:
        """The segment, checked. Raises `StoreError` if it is not stored or corrupt."""
        ...

    def put(self, namespace: str, segment: Segment) -> str:
        """Store under its content's id, which is returned; storing it again changes nothing."""
        (segment_id,) = self.change(namespace, add=[segment])
        return segment_id

    def delete(self, namespace: str, segment_id: str) -> None:
        """Remove a segment; an unknown one is ignored."""
        self.change(namespace, remove=[segment_id])

    def change(
        self,
        namespace: str,
        *,
        add: Sequence[Segment] = (),
        remove: Sequence[str] = (),
        follows: Manifest | None = None,
    ) -> list[str]:
        """Add and remove segments at once, and return the ids of those added.

        The change is atomic for readers, also if the writer dies. Unknown ids are ignored, and a
        segment that is both added and removed stays. An operator's change is made whatever the
        store holds. A change that builds on a manifest passes it as `follows`, and raises
        `StoreError` if the store has lost that content since.
        """
        ...

    def accept_loss(self) -> None:
        """Accept the present content as complete, so that all readers follow it again."""
        ...

    def wait_for_change(self, timeout: float) -> None:
        """Return after `timeout` seconds, or earlier after a notification, which is only a hint."""
        ...

    def close(self) -> None:
        """Free connections and threads."""
        ...


def check_namespace(namespace: str) -> None:
    """Raise `ConfigError` unless the name is safe in paths and keys."""
    if NAMESPACE.fullmatch(namespace) is None:
        raise ConfigError(
            "namespace",
            f"{namespace!r} must be 1 to 64 of letters, digits, '_', '.', '-', "
            "starting with a letter or digit",
        )


def check_names(namespace: str, segment_id: str) -> None:
    """Raise `ConfigError` unless both are safe in paths and keys."""
    check_namespace(namespace)
    if SEGMENT_ID.fullmatch(segment_id) is None:
        raise ConfigError("segment_id", f"{segment_id!r} must be 32 hexadecimal digits")


def is_entry(namespace: str, segment_id: str, size: object) -> bool:
    """Whether these three values of a manifest name a segment."""
    is_name = NAMESPACE.fullmatch(namespace) and SEGMENT_ID.fullmatch(segment_id)
    return is_name is not None and isinstance(size, int) and size >= 0


def damaged_manifest(origin: str, entry: str) -> DamagedError:
    """The error for an entry that `is_entry` refuses."""
    return DamagedError(
        f"{origin}: the manifest is corrupt at {entry}; empty the store and build again"
    )


def listed_sizes(store: SegmentStore) -> Mapping[str, Mapping[str, int]]:
    """The sizes that a store's manifest lists. Raises `StoreError` if the manifest is lost."""
    manifest = store.manifest()
    if manifest.is_lost_since(Manifest()):
        raise loss(store.url)
    return manifest.sizes


def loss(url: str) -> StoreError:
    """The error raised when a store has lost data that it held before."""
    return StoreError(
        f"{url}: has lost its data; build the corpora again, or give them up: "
        "draftline corpus accept-loss"
    )


def require_id(segment: Segment, segment_id: str, origin: str) -> None:
    """Raise `StoreError` unless the content is the one that the id names."""
    if segment.segment_id != segment_id:
        raise DamagedError(
            f"{origin}: holds another segment ({segment.segment_id}); build the corpus again"
        )
