"""The embedded store: segment files in a folder, listed by `manifest.json`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..core.errors import StoreError
from .replace_file import replace_file
from .segment import Segment
from .store import Manifest, check_names, check_namespace

MANIFEST = "manifest.json"
LOCK = "lock"
# Deleted files stay so long for readers that hold an older manifest.
GRACE_SECONDS = 60.0


class DirectoryStore:
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
            return Manifest({name: dict(sizes) for name, sizes in listed}, written=True)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{path}: corrupt; delete the folder and build again") from error

    def get(self, namespace: str, segment_id: str) -> Segment:
        """The segment, memory-mapped and checked."""
        check_names(namespace, segment_id)
        return Segment.open(self._path(namespace, segment_id))

    def put(self, namespace: str, segment: Segment) -> str:
        """Write the file, then name it in the manifest."""
        check_namespace(namespace)
        segment_id = segment.segment_id
        path = self._path(namespace, segment_id)

        def add(sizes: dict[str, dict[str, int]]) -> None:
            sizes.setdefault(namespace, {})[segment_id] = len(segment.data)

        with _reported(path), self._locked():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, segment.data[:])
            self._change(add)
        return segment_id

    def delete(self, namespace: str, segment_id: str) -> None:
        """Take the segment out of the manifest; its file goes with a later write."""
        check_names(namespace, segment_id)
        if not self.manifest().written:
            return

        def remove(sizes: dict[str, dict[str, int]]) -> None:
            listed = sizes.get(namespace, {})
            listed.pop(segment_id, None)
            if not listed:
                sizes.pop(namespace, None)

        path = self._path(namespace, segment_id)
        with _reported(path), self._locked():
            if path.exists():
                os.utime(path)
            self._change(remove)

    def wait_for_change(self, timeout: float) -> None:
        """Wait `timeout` seconds: a folder does not tell of changes."""
        self._closed.wait(timeout)

    def close(self) -> None:
        """End a `wait_for_change` in another thread."""
        self._closed.set()

    def _path(self, namespace: str, segment_id: str) -> Path:
        return self._folder / namespace / f"{segment_id}.segment"

    def _change(self, edit: Callable[[dict[str, dict[str, int]]], None]) -> None:
        sizes = {name: dict(listed) for name, listed in self.manifest().sizes.items()}
        edit(sizes)
        text = json.dumps({"segments": sizes}, sort_keys=True, indent=1)
        replace_file(self._folder / MANIFEST, text.encode())
        self._collect(sizes)

    def _collect(self, sizes: dict[str, dict[str, int]]) -> None:
        """Remove files that no manifest of the last minute names."""
        oldest = time.time() - GRACE_SECONDS
        # No namespace begins with a dot: what is learned and not folded yet lies there.
        for path in self._folder.glob("[!.]*/*"):
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
