"""The embedded store: segment files in a folder, listed by `manifest.json`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..core.errors import StoreError
from .replace_file import replace_file
from .segment import Segment
from .store import (
    LOCK,
    MANIFEST,
    Manifest,
    SegmentStore,
    check_names,
    check_namespace,
    checked_sizes,
    require_id,
)

# Deleted files stay so long for readers that hold an older manifest.
GRACE_SECONDS = 60.0


class DirectoryStore(SegmentStore):
    """Implements `SegmentStore` in a folder, which is made by the first `put`.

    One writer at a time (a file lock, several processes are fine), any number of readers without
    a lock: the manifest is replaced by an atomic rename. Segments are memory-mapped, so processes
    of one machine share their pages.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._closed = threading.Event()

    @property
    def url(self) -> str:
        """The folder."""
        return str(self._folder)

    def manifest(self) -> Manifest:
        """What is stored now."""
        path = self._folder / MANIFEST
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return Manifest()
        except OSError as error:
            raise StoreError(f"{path}: cannot be read ({error})") from error
        try:
            listed = json.loads(text)["segments"].items()
            sizes = {name: dict(sizes) for name, sizes in listed}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{path}: corrupt; delete the folder and build again") from error
        return Manifest(checked_sizes(sizes, str(path)), written=True)

    def get(self, namespace: str, segment_id: str) -> Segment:
        """The segment, memory-mapped and checked."""
        check_names(namespace, segment_id)
        path = self._path(namespace, segment_id)
        segment = Segment.open(path)
        require_id(segment, segment_id, str(path))
        return segment

    def change(
        self, namespace: str, *, add: Sequence[Segment] = (), remove: Sequence[str] = ()
    ) -> list[str]:
        """Write what is added, then replace the manifest."""
        check_namespace(namespace)
        for segment_id in remove:
            check_names(namespace, segment_id)
        if not add and not self.manifest().written:
            return []
        added = {segment.segment_id: segment.data for segment in add}
        removed = [name for name in remove if name not in added]
        with _reported(self._folder), self._locked():
            for segment_id, data in added.items():
                path = self._path(namespace, segment_id)
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, data[:])
            for path in (self._path(namespace, segment_id) for segment_id in removed):
                if path.exists():
                    os.utime(path)
            self._switch(namespace, {name: len(data) for name, data in added.items()}, removed)
        return list(added)

    def wait_for_change(self, timeout: float) -> None:
        """Wait `timeout` seconds: a folder does not tell of changes."""
        self._closed.wait(timeout)

    def close(self) -> None:
        """End a `wait_for_change` in another thread."""
        self._closed.set()

    def _path(self, namespace: str, segment_id: str) -> Path:
        return self._folder / namespace / f"{segment_id}.segment"

    def _switch(self, namespace: str, added: dict[str, int], removed: Sequence[str]) -> None:
        sizes = {name: dict(listed) for name, listed in self.manifest().sizes.items()}
        listed = sizes.pop(namespace, {}) | added
        left = {name: size for name, size in listed.items() if name not in removed}
        if left:
            sizes[namespace] = left
        text = json.dumps({"segments": sizes}, sort_keys=True, indent=1)
        replace_file(self._folder / MANIFEST, text.encode())
        self._collect(sizes)

    def _collect(self, sizes: dict[str, dict[str, int]]) -> None:
        """Remove files that no manifest of the last minute names."""
        oldest = time.time() - GRACE_SECONDS
        # No namespace begins with a dot: what is learned and not folded yet lies there.
        for path in [*self._folder.glob("[!.]*/*"), *self._folder.glob("*.new")]:
            listed = sizes.get(path.parent.name, {})
            if path.stem not in listed and path.stat().st_mtime < oldest:
                path.unlink()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error})") from error
