"""Locks of a `DirectoryStore`'s folder, for any number of processes of one machine.

A lock is freed when its process dies. A stopped process that holds a lock blocks the others for a
bounded time only.

.delta/.lock  held while a log or the learning policy is read and replaced
.delta/.fold  held while a namespace is folded or forgotten
.delta/.clock touched to read the file system's clock
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ...core.errors import StoreError

DELTA = ".delta"
# Work under a lock takes milliseconds; a fold, which an erasure waits for, takes seconds.
WAIT_SECONDS = 30.0
PAUSE_SECONDS = 0.001


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
