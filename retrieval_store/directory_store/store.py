"""The embedded store: segment files in a folder, listed by `manifest.json`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ...core.errors import StoreError
from ..segment.segment import Segment
from ..store import (
    Manifest,
    SegmentStore,
    check_names,
    check_namespace,
    damaged_manifest,
    is_entry,
    require_id,
)
from .folder import (
    DELTA,
    LOCK,
    fold_lock,
    folder_name,
    lock_file,
    log_lock,
    older_folder,
    replace_file,
)

MANIFEST = "manifest.json"
# Seconds that deleted files stay for readers with an older manifest.
GRACE_SECONDS = 60.0
# Another writer may be writing a large corpus; a fold or a compaction does not wait for it.
WAIT_SECONDS = 600.0
SHORT_WAIT_SECONDS = 30.0


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
        """The path of the folder, which names the store in messages."""
        return str(self._folder)

    def manifest(self) -> Manifest:
        """The segments stored now. Raises `StoreError`, also for a damaged file."""
        path = self._folder / MANIFEST
        text = _read_if_there(path)
        if text is None:
            if not any(self._folder.glob("[!.]*/*.segment")):
                return Manifest()
            # Both may have been written between the two reads, the manifest first.
            text = _read_if_there(path)
        if text is None:
            return Manifest(is_broken=True)
        try:
            return _decode(text, str(path))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"{path}: corrupt; delete the folder and build again") from error

    def get(self, namespace: str, segment_id: str) -> Segment:
        """The segment, memory-mapped and checked."""
        check_names(namespace, segment_id)
        path = self._found(namespace, segment_id)
        segment = Segment.open(path)
        require_id(segment, segment_id, str(path))
        return segment

    def change(
        self,
        namespace: str,
        *,
        add: Sequence[Segment] = (),
        remove: Sequence[str] = (),
        follows: Manifest | None = None,
    ) -> list[str]:
        """Write what is added, then replace the manifest."""
        check_namespace(namespace)
        for segment_id in remove:
            check_names(namespace, segment_id)
        if not add and not self.manifest().written:
            return []
        added = {segment.segment_id: segment.data for segment in add}
        removed = [name for name in remove if name not in added]
        wait = WAIT_SECONDS if follows is None else SHORT_WAIT_SECONDS
        with _reported(self._folder), self._locked(wait):
            old = self.manifest()
            origin = old.origin_after(follows, self.url, adds=bool(add))
            if follows is not None and not old.written:
                # If this writer dies, its segment must not look like one of a lost manifest.
                self._write({}, origin)
            for segment_id, data in added.items():
                path = self._path(namespace, segment_id)
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, data[:])
            for path in (self._found(namespace, segment_id) for segment_id in removed):
                if path.exists():
                    os.utime(path)
            listed = dict(old.sizes.get(namespace, {}))
            listed |= {name: len(data) for name, data in added.items()}
            left = {name: size for name, size in listed.items() if name not in removed}
            self._switch({**old.sizes, namespace: left}, origin)
        return list(added)

    def accept_loss(self) -> None:
        """Replace the manifest, which may be lost; unlisted segments are deleted later."""
        with _reported(self._folder), self._locked(WAIT_SECONDS):
            self._switch(self.manifest().sizes, "")

    def wait_for_change(self, timeout: float) -> None:
        """Wait `timeout` seconds, or until `close`: a folder sends no notifications."""
        self._closed.wait(timeout)

    def close(self) -> None:
        """End a `wait_for_change` in another thread."""
        self._closed.set()

    def _path(self, namespace: str, segment_id: str) -> Path:
        return self._folder / folder_name(namespace) / f"{segment_id}.segment"

    def _found(self, namespace: str, segment_id: str) -> Path:
        """The file of a segment, which an older version may have written."""
        path = self._path(namespace, segment_id)
        older = None if path.exists() else older_folder(self._folder, namespace)
        return path if older is None else older / path.name

    def _switch(self, sizes: Mapping[str, Mapping[str, int]], origin: str) -> None:
        self._write({name: dict(listed) for name, listed in sizes.items() if listed}, origin)
        self._collect(sizes)

    def _write(self, sizes: Mapping[str, Mapping[str, int]], origin: str) -> None:
        replace_file(self._folder / MANIFEST, _encode(sizes, origin))

    def _collect(self, sizes: Mapping[str, Mapping[str, int]]) -> None:
        """Remove files that no manifest of the last minute names."""
        # By the clock that stamps the files: this process's own may be wrong.
        oldest = (self._folder / MANIFEST).stat().st_mtime - GRACE_SECONDS
        kept: dict[str, set[str]] = {}
        for namespace, listed in sizes.items():
            # Older versions named folders like namespaces, also on case-insensitive file systems.
            for name in {folder_name(namespace), namespace.casefold()}:
                kept.setdefault(name, set()).update(listed)
        # No namespace begins with a dot; such folders hold the logs of learned text.
        for path in [*self._folder.glob("[!.]*/*"), *self._folder.glob("*.new")]:
            listed = kept.get(path.parent.name.casefold(), ())
            # A file that cannot be removed does no harm.
            with contextlib.suppress(OSError):
                if path.stem not in listed and path.is_file() and path.stat().st_mtime < oldest:
                    path.unlink()

    @contextlib.contextmanager
    def _locked(self, seconds: float) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / LOCK
        with path.open("w") as file:
            if not lock_file(file, seconds):
                raise StoreError(f"{path}: another writer has held this lock for {seconds:.0f} s")
            yield


def _read_if_there(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error})") from error


def _encode(sizes: Mapping[str, Mapping[str, int]], origin: str) -> bytes:
    fields: dict[str, object] = {"segments": sizes}
    if origin:
        fields["origin"] = origin
    return json.dumps(fields | {"sha256": _sum(fields)}, sort_keys=True, indent=1).encode()


def _decode(text: bytes, path: str) -> Manifest:
    """Raises `DamagedError` for an entry that names nothing, and what other JSON raises."""
    fields = json.loads(text)
    # Older versions wrote none.
    stored = fields.pop("sha256", None)
    if stored is not None and stored != _sum(fields):
        raise ValueError("checksum")
    sizes = {name: dict(listed) for name, listed in fields["segments"].items()}
    for namespace, listed in sizes.items():
        for segment_id, size in listed.items():
            if not is_entry(namespace, segment_id, size):
                raise damaged_manifest(path, f"{namespace}/{segment_id}")
    whole = {name: listed for name, listed in sizes.items() if listed}
    return Manifest(whole, written=True, origin=str(fields.get("origin", "")))


def _sum(fields: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error})") from error


class DirectoryEraser:
    """Implements `NamespaceEraser` in the folder of a `DirectoryStore`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = DirectoryStore(folder)

    def erase(self, namespace: str) -> None:
        """Delete a namespace: its manifest entries, then its files; maps of them stay readable."""
        if not self._folder.is_dir():
            return
        with fold_lock(self._folder, wait=True), log_lock(self._folder):
            for segment_id in self._store.manifest().segment_ids(namespace):
                self._store.delete(namespace, segment_id)
            try:
                for folder in self._folders(namespace):
                    shutil.rmtree(folder)
            except OSError as error:
                raise StoreError(f"{self._folder}: cannot be deleted ({error})") from error

    def remains(self, namespace: str) -> list[str]:
        """Files and manifest entries of the namespace, sorted."""
        files = [str(path) for folder in self._folders(namespace) for path in folder.rglob("*")]
        listed = self._store.manifest().segment_ids(namespace)
        return sorted(files + [f"manifest {name}" for name in listed])

    def close(self) -> None:
        """Do nothing: no file is open between calls."""

    def _folders(self, namespace: str) -> list[Path]:
        parents = [self._folder, self._folder / DELTA]
        folders = [parent / folder_name(namespace) for parent in parents]
        older = [older_folder(parent, namespace) for parent in parents]
        # Files of the store itself, such as its manifest, have names that a namespace could have.
        return [path for path in (*folders, *older) if path is not None and path.is_dir()]
