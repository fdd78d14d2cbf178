"""Tenants in a file, YAML or JSON by its name; the audit log beside it."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ...core.errors import StoreError
from .store import Change, Record

AUDIT_SUFFIX = ".audit.jsonl"
# Digests are no keys, but nobody else needs them.
MODE = 0o600


class TenantFile:
    """One file with a mapping `tenants`, a list; replaced as a whole, never written in place."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    @property
    def where(self) -> str:
        """The file."""
        return str(self._path)

    def version(self) -> tuple[int, ...]:
        """Device, inode, time and size. Raises `StoreError` where there is no file."""
        try:
            status = self._path.stat()
        except OSError as error:
            raise self._unreadable(error) from error
        return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size

    def read(self) -> Sequence[Record]:
        """All records. Raises `StoreError`."""
        try:
            text = self._path.read_text(encoding="utf-8")
            data = yaml.safe_load(text)
        except OSError as error:
            raise self._unreadable(error) from error
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            # What a parser says may quote the file.
            mark = getattr(error, "problem_mark", None)
            place = f" line {mark.line + 1}" if mark else ""
            raise StoreError(f"{self.where}{place}: is neither YAML nor JSON") from error
        return _records(data, self.where)

    def change(self, change: Change) -> None:
        """Apply a change and note it. Raises `StoreError` and what `change` raises."""
        try:
            with self._locked():
                before = self.read() if self._path.exists() else []
                after, entry = change(before)
                # First: nothing is changed that could not be written down.
                self._note(entry.as_json())
                self._replace({"tenants": [dict(record) for record in after]})
        except OSError as error:
            raise StoreError(f"{self.where}: cannot be written: {error.strerror}") from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with Path(f"{self._path}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _note(self, line: str) -> None:
        path = f"{self._path}{AUDIT_SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, MODE)
        with os.fdopen(descriptor, "a", encoding="utf-8") as log:
            log.write(f"{line}\n")
            log.flush()
            os.fsync(log.fileno())

    def _replace(self, data: dict[str, Any]) -> None:
        """The file with this content, whole or not at all, with its owner's mode."""
        is_json = self._path.suffix == ".json"
        text = json.dumps(data, indent=2) if is_json else yaml.safe_dump(data, sort_keys=False)
        mode = self._path.stat().st_mode & 0o777 if self._path.exists() else MODE
        # A link stays one, and what it names is replaced.
        target = self._path.resolve()
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(f"{text}\n" if is_json else text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(mode)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _unreadable(self, error: OSError) -> StoreError:
        return StoreError(f"{self.where}: cannot be read: {error.strerror}")


def _records(data: object, where: str) -> Sequence[Record]:
    tenants = data.get("tenants") if isinstance(data, Mapping) else None
    if not isinstance(tenants, list) or not all(isinstance(one, dict) for one in tenants):
        raise StoreError(f"{where}: must hold tenants: a list of tenants, each with a name")
    return tenants
