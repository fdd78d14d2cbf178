"""The embedded delta log: a file for each namespace, in the folder of a `DirectoryStore`.

.delta/<folder>/<tag>.log  `folder` is the namespace's (`folder.py`), `tag` the texts' fingerprint
.learning.json             the namespaces that are excluded from learning, beside the manifest

Damage costs one line: each is the CRC-32 of the rest, 8 hexadecimal digits, a space, and JSON:

    {"epoch", "next"}                          first: the mark of readers, and the next position
    {"folded"}                                 `Folded`, as text
    [position, time, digest, weight, tokens]   an event; tokens are base64 of int32, or null

Older versions wrote one JSON object without a checksum, which is read.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...core.errors import DamagedError, StoreError
from ..delta.damage import DamageCount
from ..delta.delta_log import DeltaEvent, Folded, LoggedEvent, StoreClock, checked_event
from ..delta.settings import LearningSettings, Tagged
from ..learning import check_learned
from ..store import check_namespace
from .folder import (
    DELTA,
    fold_lock,
    folder_name,
    folder_time,
    log_lock,
    namespace_of,
    older_folder,
    replace_file,
)

# No namespace begins with a dot.
POLICY = ".learning.json"
# The errors of reading anything but the expected JSON.
UNSOUND = (ValueError, KeyError, TypeError, AttributeError, RecursionError, DamagedError)
_Stamp = tuple[int, int, int]


def namespaces_off(folder: Path) -> frozenset[str]:
    """The namespaces excluded from learning, read from a store's folder.

    Raises `StoreError`, also for a file that is damaged. Callers that must not miss a change hold
    `log_lock`.
    """
    path = folder / POLICY
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["off"]
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise _corrupt(path) from error
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise _corrupt(path)
    return frozenset(listed)


class DirectoryLearningPolicy:
    """Implements `LearningPolicy` in the folder of a `DirectoryStore`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def off(self) -> frozenset[str]:
        """Namespaces excluded from learning; needs no lock, as the file is replaced as a whole."""
        return namespaces_off(self._folder)

    def switch(self, namespace: str, *, learns: bool) -> None:
        """Forbid or allow learning of a namespace, under the lock that appending takes."""
        check_learned(namespace)
        path = self._folder / POLICY
        with log_lock(self._folder):
            rest = namespaces_off(self._folder) - {namespace}
            off = sorted(rest if learns else rest | {namespace})
            try:
                replace_file(path, json.dumps({"off": off}).encode())
            except OSError as error:
                raise StoreError(f"{path}: cannot be written ({error})") from error

    def close(self) -> None:
        """Do nothing: no file is open between calls."""


def _corrupt(path: Path) -> StoreError:
    return StoreError(f"{path}: corrupt; delete it, then `draftline corpus learn NAMESPACE --off`")


@dataclass(frozen=True, slots=True)
class LogContent:
    """The content of a log file.

    damaged  names of the skipped lines
    lines    line -> its event, so that the next read does not decode it again
    """

    epoch: str
    next_position: int = 1
    folded: Folded = field(default_factory=Folded)
    events: tuple[LoggedEvent, ...] = ()
    damaged: tuple[str, ...] = ()
    lines: Mapping[bytes, LoggedEvent] = field(default_factory=dict)


def encode_log(content: LogContent) -> bytes:
    """The bytes of a log file, for `decode_log`."""
    rows: list[object] = [{"epoch": content.epoch, "next": content.next_position}]
    rows.append({"folded": content.folded.to_json()})
    rows += [_event_row(logged) for logged in content.events]
    return b"".join(_line(json.dumps(row).encode()) for row in rows)


def decode_log(data: bytes, origin: str, known: Mapping[bytes, LoggedEvent]) -> LogContent:
    """The valid content of a file of either format; `known` are the `lines` of an earlier read.

    `origin` names the file in the `DamagedError` raised where nothing can be read.
    """
    if data.startswith(b"{"):
        return _decode_older(data, origin)
    decoder = _Decoder(origin, known)
    for line in data.removesuffix(b"\n").split(b"\n"):
        decoder.add(line)
    return decoder.content(data)


def _line(text: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _sum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


class _Decoder:
    """Decodes a log file line by line."""

    def __init__(self, origin: str, known: Mapping[bytes, LoggedEvent]) -> None:
        self._origin = origin
        self._known = known
        self._lines: dict[bytes, LoggedEvent] = {}
        self._epoch = ""
        self._next = 1
        self._folded: Folded | None = None
        self._events: list[LoggedEvent] = []
        self._damaged: list[str] = []

    def add(self, line: bytes) -> None:
        """Decode one line, valid or damaged."""
        event = self._known.get(line)
        try:
            event = event or self._decoded(line)
        except UNSOUND:
            self._damaged.append(f"line {_sum(line)}")
        if event is not None:
            self._lines[line] = event
            self._events.append(event)

    def content(self, data: bytes) -> LogContent:
        """The content of the log file `data`, after `add` was called for all its lines."""
        last = max((int(logged.position) for logged in self._events), default=0)
        return LogContent(
            # A new epoch, so that readers read the log again.
            self._epoch or f"damaged {_sum(data)}",
            max(self._next, last + 1),
            self._folded or Folded(),
            tuple(self._events),
            tuple(self._damaged) or (() if self._epoch else ("head",)),
            self._lines,
        )

    def _decoded(self, line: bytes) -> LoggedEvent | None:
        digits, _, text = line.partition(b" ")
        if digits.decode() != _sum(text):
            raise ValueError("checksum")
        row = json.loads(text.decode())
        if isinstance(row, list):
            return _event(row)
        if "folded" in row:
            self._folded = Folded.from_json(row["folded"], self._origin)
        else:
            self._epoch, self._next = str(row["epoch"]), int(row["next"])
        return None


def _decode_older(data: bytes, origin: str) -> LogContent:
    damaged: list[str] = []
    events: list[LoggedEvent] = []
    folded = Folded()
    try:
        fields = json.loads(data)
        rows: Sequence[Any] = list(fields["events"])
        epoch, following = str(fields["epoch"]), int(fields["next"])
    except UNSOUND:
        return LogContent(f"damaged {_sum(data)}", damaged=(f"file {_sum(data)}",))
    try:
        folded = Folded.from_json(fields["folded"], origin)
    except UNSOUND:
        damaged.append("folded")
    for index, row in enumerate(rows):
        try:
            events.append(_event(row))
        except UNSOUND:
            damaged.append(f"event {index}")
    return LogContent(epoch, following, folded, tuple(events), tuple(damaged))


def _event_row(logged: LoggedEvent) -> list[Any]:
    event = logged.event
    packed = None
    if event.tokens is not None:
        packed = base64.b64encode(event.tokens.astype("<i4").tobytes()).decode()
    return [logged.position, logged.time, event.digest, event.weight, packed]


def _event(row: Any) -> LoggedEvent:
    position, time, digest, weight, packed = row
    if not isinstance(position, str) or len(position) != 16 or not position.isdecimal():
        raise ValueError("position")
    if not math.isfinite(time):
        raise ValueError("time")
    data = None if packed is None else base64.b64decode(packed, validate=True)
    return LoggedEvent(position, float(time), checked_event(digest, weight, data))


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
