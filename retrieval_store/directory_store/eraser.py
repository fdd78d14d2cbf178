"""Deletes a namespace from a folder: its segments' files and its log."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...core.errors import StoreError
from .locks import DELTA, fold_lock, log_lock
from .namespace_folder import folder_name, older_folder
from .store import DirectoryStore


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
