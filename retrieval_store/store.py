"""Where segments are kept: content-named, in namespaces, listed by one manifest."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..core.errors import ConfigError, StoreError
from .segment import Segment

SEGMENT_ID = re.compile(r"[0-9a-f]{32}")
NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# Files of a store in a folder, among the folders of its namespaces.
MANIFEST, LOCK = "manifest.json", "lock"


@dataclass(frozen=True, slots=True)
class Manifest:
    """All segments of a store at one moment.

    sizes    namespace -> segment id -> bytes; no empty namespaces
    written  False if nothing was ever stored here: a store that is new, or that lost its data
    """

    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    written: bool = False

    @property
    def version(self) -> str:
        """A digest of the content: equal content, equal version."""
        content = json.dumps([self.written, self.sizes], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def segment_ids(self, namespace: str) -> list[str]:
        """Ids of a namespace's segments, sorted."""
        return sorted(self.sizes.get(namespace, {}))


class SegmentStore(Protocol):
    """Keeps segments. Every method raises `StoreError` if the store is out of reach.

    Readers see the manifest before or after a change, never between; a segment that a manifest
    lists can be read for at least a minute after it was deleted.
    """

    @property
    def url(self) -> str:
        """Names the store in messages, without secrets."""
        ...

    def manifest(self) -> Manifest:
        """What is stored now."""
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
        self, namespace: str, *, add: Sequence[Segment] = (), remove: Sequence[str] = ()
    ) -> list[str]:
        """Add and remove at once: readers see all of it or nothing. The ids of what was added.

        Unknown ids are ignored, and what is both added and removed stays. A writer that dies
        leaves the manifest as it was, or as it shall be.
        """
        ...

    def wait_for_change(self, timeout: float) -> None:
        """Return after `timeout` seconds, or sooner when told of a change (a hint, no promise)."""
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
    if namespace in {MANIFEST, LOCK}:
        raise ConfigError("namespace", f"{namespace!r} is the name of a store's own file")


def check_names(namespace: str, segment_id: str) -> None:
    """Raise `ConfigError` unless both are safe in paths and keys."""
    check_namespace(namespace)
    if SEGMENT_ID.fullmatch(segment_id) is None:
        raise ConfigError("segment_id", f"{segment_id!r} must be 32 hexadecimal digits")


def checked_sizes(
    sizes: Mapping[str, Mapping[str, object]], origin: str
) -> dict[str, dict[str, int]]:
    """The sizes of a manifest as read. Raises `StoreError` unless all names and sizes are sound."""
    checked: dict[str, dict[str, int]] = {}
    for namespace, listed in sizes.items():
        for segment_id, size in listed.items():
            sound = NAMESPACE.fullmatch(namespace) and SEGMENT_ID.fullmatch(segment_id)
            if not sound or not isinstance(size, int):
                raise StoreError(
                    f"{origin}: the manifest is corrupt at {namespace}/{segment_id}; "
                    "empty the store and build again"
                )
            checked.setdefault(namespace, {})[segment_id] = size
    return checked


def require_id(segment: Segment, segment_id: str, origin: str) -> None:
    """Raise `StoreError` unless the content is the one that the id names."""
    if segment.segment_id != segment_id:
        raise StoreError(
            f"{origin}: holds another segment ({segment.segment_id}); build the corpus again"
        )
