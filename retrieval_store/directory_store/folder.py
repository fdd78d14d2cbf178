"""The folders, files and locks of a `DirectoryStore`, for any number of processes of one machine.

In the name of a namespace's folder lower-case letters, digits, `_` and `-` stay; any other
character becomes `=` and two hexadecimal digits. So no folder has the name of a store file, and
namespaces do not collide on case-insensitive file systems. Older versions used the plain namespace
as the folder's name; such folders are only read.

A lock is freed when its process dies. A stopped process that holds a lock blocks the others for a
bounded time only.

.delta/.lock  held while a log or the learning policy is read and replaced
.delta/.fold  held while a namespace is folded or forgotten
.delta/.clock touched to read the file system's clock
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ...core.errors import StoreError
from ..store import NAMESPACE

# The one file of the store whose name has no leading dot.
LOCK = "lock"
PLAIN = re.compile(r"[a-z0-9_-]")
ENCODED = re.compile(r"(?:[a-z0-9_-]|=[0-9a-f]{2})+")
DELTA = ".delta"
# Work under a lock takes milliseconds; a fold, which an erasure waits for, takes seconds.
WAIT_SECONDS = 30.0
PAUSE_SECONDS = 0.001


def folder_name(namespace: str) -> str:
    """The folder of a namespace: at most 192 characters for a name that is safe."""
    if namespace == LOCK:
        return f"={ord(LOCK[0]):02x}{LOCK[1:]}"
    return "".join(char if PLAIN.fullmatch(char) else f"={ord(char):02x}" for char in namespace)


def namespace_of(name: str) -> str | None:
    """The namespace of a folder by its name; None for other folders."""
    namespace = name
    if ENCODED.fullmatch(name):
        namespace = re.sub("=(..)", lambda code: chr(int(code[1], 16)), name)
    return namespace if NAMESPACE.fullmatch(namespace) else None


def older_folder(parent: Path, namespace: str) -> Path | None:
    """The folder of a namespace under its older name, if it exists with exactly that spelling."""
    if namespace == folder_name(namespace):
        return None
    try:
        # The exact spelling, also on case-insensitive file systems.
        return next((path for path in parent.iterdir() if path.name == namespace), None)
    except OSError:
        return None


def replace_file(path: Path, content: bytes | memoryview) -> None:
    """Atomically replace the file `path` by `content`. Raises `OSError`."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".new")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
        _sync_folder(path.parent)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """Make renames in the folder survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def log_lock(folder: Path) -> contextlib.AbstractContextManager[bool]:
    """A context that holds the lock on logs and policy of a store's folder; waits for it."""
    return _file_lock(folder, ".lock", wait=True)


def fold_lock(folder: Path, *, wait: bool) -> contextlib.AbstractContextManager[bool]:
    """A context that tries to lock a store's folder against other folds and erasures; gives whether
    it holds the lock."""
    return _file_lock(folder, ".fold", wait=wait)


def lock_file(file: IO[Any], seconds: float) -> bool:
    """Whether an open file could be locked within that many seconds. Raises `OSError`."""
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(PAUSE_SECONDS)
        else:
            return True


def folder_time(folder: Path) -> float | None:
    """Seconds since the epoch, by the clock that stamps the files of a store's folder.

    Processes of several machines share that clock, so their own clocks do not matter. None if
    nothing was learned yet, or the folder is read-only.
    """
    path = folder / DELTA / ".clock"
    try:
        path.touch()
        return path.stat().st_mtime
    except OSError:
        return None


@contextlib.contextmanager
def _file_lock(folder: Path, name: str, *, wait: bool) -> Iterator[bool]:
    """A context: whether the lock is held.

    Raises `StoreError` if the folder cannot be written, or if waiting for the lock timed out.
    """
    path = folder / DELTA / name
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("w"))
            held = lock_file(file, WAIT_SECONDS if wait else 0.0)
        except OSError as error:
            raise StoreError(f"{path}: cannot be written ({error})") from error
        if wait and not held:
            raise StoreError(f"{path}: another process has held this lock for {WAIT_SECONDS:.0f} s")
        yield held
