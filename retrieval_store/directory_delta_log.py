"""The embedded delta log: a JSON file for each namespace, in the folder of a `DirectoryStore`.

.delta/<namespace>/<tag>.json  epoch, the next position, `folded` and the events; `tag` is the
                               fitness of the texts
"""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import StoreError
from .delta_log import DeltaEvent, Folded, LoggedEvent
from .directory_learning_policy import namespaces_off
from .directory_locks import DELTA, fold_lock, log_lock
from .fitness import Fitness
from .learning_settings import LearningSettings
from .replace_file import replace_file
from .store import check_namespace


@dataclass(frozen=True, slots=True)
class _Content:
    """What a file holds."""

    epoch: str
    next_position: int = 1
    folded: Folded = field(default_factory=Folded)
    events: tuple[LoggedEvent, ...] = ()


class DirectoryDeltaLog:
    """Implements `DeltaLog` in a folder, for any number of processes of one machine.

    A file is replaced as a whole, so readers need no lock; one that did not change is not read
    again.
    """

    def __init__(self, folder: Path, fitness: Fitness, settings: LearningSettings) -> None:
        self._folder = folder / DELTA
        self._tag = fitness.tag
        self._settings = settings
        self._seen: dict[Path, tuple[tuple[int, int, int], _Content]] = {}

    def append(self, namespace: str, events: Sequence[DeltaEvent]) -> bool:
        """Replace the file by one that holds the events, too, within the log's bounds."""
        check_namespace(namespace)
        now = time.time()

        def add(old: _Content) -> _Content:
            start = old.next_position
            added = [
                LoggedEvent(f"{start + index:016d}", now, event)
                for index, event in enumerate(events)
            ]
            oldest = now - self._settings.log_seconds
            kept = [logged for logged in (*old.events, *added) if logged.time >= oldest]
            return replace(
                old,
                next_position=start + len(added),
                events=tuple(kept[-self._settings.log_entries :]),
            )

        with log_lock(self._folder.parent):
            if namespace in namespaces_off(self._folder.parent):
                return False
            self._change(namespace, add)
        return True

    def epochs(self) -> dict[str, str]:
        """Of the namespaces that have texts of this fitness."""
        try:
            paths = sorted(self._folder.glob(f"*/{self._tag}.json"))
        except OSError as error:
            raise StoreError(f"{self._folder}: cannot be read ({error})") from error
        return {path.parent.name: self._epoch(path) for path in paths}

    def read(self, namespace: str, after: str = "") -> list[LoggedEvent]:
        """Events after a position."""
        events = self._load(self._path(namespace)).events
        return [logged for logged in events if logged.position > after]

    def folded(self, namespace: str) -> Folded:
        """What the last fold said."""
        return self._load(self._path(namespace)).folded

    def fold(self, namespace: str, folded: Folded, up_to: str = "") -> None:
        """Replace the file; the lock is the process's own as long as it lives."""

        def cut(old: _Content) -> _Content:
            left = tuple(logged for logged in old.events if logged.position > up_to)
            return replace(old, epoch=secrets.token_hex(8), folded=folded, events=left)

        with log_lock(self._folder.parent):
            self._change(namespace, cut)

    @contextlib.contextmanager
    def locked(self, namespace: str) -> Iterator[bool]:
        """Without waiting; one namespace of a folder at a time."""
        check_namespace(namespace)
        with fold_lock(self._folder.parent, wait=False) as held:
            yield held

    def close(self) -> None:
        """Nothing is open between calls."""

    def _path(self, namespace: str) -> Path:
        return self._folder / namespace / f"{self._tag}.json"

    def _epoch(self, path: Path) -> str:
        try:
            return self._load(path).epoch
        except StoreError:
            # Whoever reads this log hears why; the other namespaces are no worse for it.
            return "corrupt"

    def _load(self, path: Path) -> _Content:
        try:
            found = path.stat()
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            seen = self._seen.get(path)
            if seen is None or seen[0] != stamp:
                text = path.read_text(encoding="utf-8")
                seen = self._seen[path] = (stamp, _decode(text, str(path)))
        except FileNotFoundError:
            self._seen.pop(path, None)
            return _Content(epoch="")
        except OSError as error:
            raise StoreError(f"{path}: cannot be read ({error})") from error
        return seen[1]

    def _change(self, namespace: str, edit: Callable[[_Content], _Content]) -> None:
        """Under `log_lock`."""
        path = self._path(namespace)
        old = self._load(path)
        old = old if old.epoch else replace(old, epoch=secrets.token_hex(8))
        try:
            path.parent.mkdir(exist_ok=True)
            replace_file(path, _encode(edit(old)).encode())
        except OSError as error:
            raise StoreError(f"{path}: cannot be written ({error})") from error


def _encode(content: _Content) -> str:
    return json.dumps(
        {
            "epoch": content.epoch,
            "next": content.next_position,
            "folded": content.folded.to_json(),
            "events": [_encode_event(logged) for logged in content.events],
        }
    )


def _encode_event(logged: LoggedEvent) -> list[Any]:
    event = logged.event
    packed = None
    if event.tokens is not None:
        packed = base64.b64encode(event.tokens.astype("<i4").tobytes()).decode()
    return [logged.position, logged.time, event.digest, event.weight, packed]


def _decode(text: str, origin: str) -> _Content:
    try:
        fields = json.loads(text)
        events = tuple(_decode_event(*entry) for entry in fields["events"])
        folded = Folded.from_json(fields["folded"], origin)
        return _Content(fields["epoch"], fields["next"], folded, events)
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{origin}: corrupt; forget the namespace") from error


def _decode_event(
    position: str, time: float, digest: str, weight: float, packed: str | None
) -> LoggedEvent:
    tokens = None
    if packed is not None:
        tokens = np.frombuffer(base64.b64decode(packed), "<i4").astype(np.int32)
    return LoggedEvent(position, time, DeltaEvent(digest, weight, tokens))
