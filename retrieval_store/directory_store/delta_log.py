"""The embedded delta log: a file for each namespace, in the folder of a `DirectoryStore`.

.delta/<folder>/<tag>.log  see `log_file.py`; `folder` is the namespace's, see
                           `namespace_folder`; `tag` is the fingerprint of the texts
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ...core.errors import DamagedError, StoreError
from ..delta.damage import DamageCount
from ..delta.delta_log import DeltaEvent, Folded, LoggedEvent, StoreClock
from ..delta.fingerprint import Tagged
from ..delta.settings import LearningSettings
from ..store import check_namespace
from .locks import DELTA, fold_lock, folder_time, log_lock
from .log_file import LogContent, decode_log, encode_log
from .namespace_folder import folder_name, namespace_of, older_folder, replace_file
from .policy import namespaces_off

_Stamp = tuple[int, int, int]


class DirectoryDeltaLog:
    """Implements `DeltaLog` in a folder, for any number of processes of one machine.

    A file is replaced as a whole, so readers need no lock; an unchanged file is not read again.
    Times come from the file system's clock.
    """

    def __init__(self, folder: Path, fingerprint: Tagged, settings: LearningSettings) -> None:
        self.damage = DamageCount()
        self._store_folder = folder
        self._folder = folder / DELTA
        self._tag = fingerprint.tag
        self._settings = settings
        self._clock = StoreClock(lambda: folder_time(folder))
        self._seen: dict[Path, tuple[_Stamp, LogContent]] = {}

    def now(self) -> float:
        """Seconds since the epoch, by the clock of the file system."""
        return self._clock.now()

    def append(self, namespace: str, events: Sequence[DeltaEvent]) -> bool:
        """Replace the file by one that also holds the events, within the log's bounds.

        False, and nothing is added, where the learning policy forbids it.
        """
        check_namespace(namespace)

        def add(old: LogContent) -> LogContent:
            start, now = old.next_position, self.now()
            oldest = now - self._settings.log_seconds
            added = [
                LoggedEvent(f"{start + index:016d}", now, event)
                for index, event in enumerate(events)
            ]
            # A time in the future comes from a wrong clock; it must not keep an event for ever.
            kept = [
                logged if logged.time <= now else replace(logged, time=now)
                for logged in (*old.events, *added)
                if logged.time >= oldest
            ]
            return replace(
                old,
                next_position=start + len(added),
                events=tuple(kept[-self._settings.log_entries :]),
            )

        with log_lock(self._store_folder):
            if namespace in namespaces_off(self._store_folder):
                return False
            self._change(namespace, add)
        return True

    def epochs(self) -> dict[str, str]:
        """Epochs of the namespaces that have texts for this model."""
        try:
            folders = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
        except OSError as error:
            raise StoreError(f"{self._folder}: cannot be read ({error})") from error
        names = (namespace_of(folder.name) for folder in folders)
        epochs = {name: self._epoch(name) for name in names if name is not None}
        return {name: epoch for name, epoch in epochs.items() if epoch}

    def read(self, namespace: str, after: str = "") -> list[LoggedEvent]:
        """Events after the position `after`, oldest first. Raises `StoreError`."""
        events = self._load(namespace).events
        return [logged for logged in events if logged.position > after]

    def folded(self, namespace: str) -> Folded:
        """The record of the last fold; an empty one if there was none. Raises `StoreError`."""
        return self._load(namespace).folded

    def fold(self, namespace: str, folded: Folded, up_to: str = "") -> None:
        """Set `folded` and drop events up to position `up_to`: the file is replaced.

        The lock cannot be lost meanwhile: the process holds it until it ends.
        """

        def cut(old: LogContent) -> LogContent:
            left = tuple(logged for logged in old.events if logged.position > up_to)
            return replace(old, epoch=secrets.token_hex(8), folded=folded, events=left)

        with log_lock(self._store_folder):
            self._change(namespace, cut)

    @contextlib.contextmanager
    def locked(self, namespace: str) -> Iterator[bool]:
        """Try to lock the folder against other folds and erasures, without waiting; whether it
        succeeded."""
        check_namespace(namespace)
        with fold_lock(self._store_folder, wait=False) as held:
            yield held

    def close(self) -> None:
        """Do nothing: no file is open between calls."""

    def _path(self, namespace: str) -> Path:
        return self._folder / folder_name(namespace) / f"{self._tag}.log"

    def _older_path(self, namespace: str) -> Path:
        """The file that older versions wrote for a namespace."""
        folder = older_folder(self._folder, namespace) or self._folder / folder_name(namespace)
        return folder / f"{self._tag}.json"

    def _epoch(self, namespace: str) -> str:
        try:
            return self._load(namespace).epoch
        except DamagedError:
            # `read` of this log raises the reason; the other namespaces are unaffected.
            return "unreadable"

    def _load(self, namespace: str) -> LogContent:
        """The sound entries of a namespace's file; without an epoch if there is none."""
        for path in (self._path(namespace), self._older_path(namespace)):
            try:
                status = path.stat()
                stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
                seen = self._seen.get(path)
                if seen is None or seen[0] != stamp:
                    known = {} if seen is None else seen[1].lines
                    content = decode_log(path.read_bytes(), str(path), known)
                    seen = self._seen[path] = (stamp, content)
                    for line in content.damaged:
                        self.damage.add(namespace, line)
            except FileNotFoundError:
                self._seen.pop(path, None)
            except OSError as error:
                raise DamagedError(f"{path}: cannot be read ({error})") from error
            else:
                return seen[1]
        return LogContent(epoch="")

    def _change(self, namespace: str, edit: Callable[[LogContent], LogContent]) -> None:
        """Replace a namespace's file by `edit` of its content; needs `log_lock`."""
        path, older = self._path(namespace), self._older_path(namespace)
        old = self._load(namespace)
        # A damaged first line is replaced by a new one here.
        has_epoch = old.epoch and not old.damaged
        old = old if has_epoch else replace(old, epoch=secrets.token_hex(8), damaged=())
        try:
            path.parent.mkdir(exist_ok=True)
            replace_file(path, encode_log(edit(old)))
            older.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{path}: cannot be written ({error})") from error


def directory_log_tags(folder: Path) -> list[str]:
    """Tags of the logs in a store's folder, sorted. Raises `StoreError`."""
    try:
        files = [*(folder / DELTA).glob("*/*.log"), *(folder / DELTA).glob("*/*.json")]
    except OSError as error:
        raise StoreError(f"{folder}: cannot be read ({error})") from error
    return sorted({path.stem for path in files})
