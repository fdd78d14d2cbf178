"""Locks of a `DirectoryStore`'s folder, for any number of processes of one machine.

.delta/.lock  held while a log or the learning policy is read and replaced
.delta/.fold  held while a namespace is folded or forgotten
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from ..core.errors import StoreError

DELTA = ".delta"


def log_lock(folder: Path) -> contextlib.AbstractContextManager[bool]:
    """Waits until nobody else changes logs or the policy of a store's folder."""
    return _file_lock(folder, ".lock", wait=True)


def fold_lock(folder: Path, *, wait: bool) -> contextlib.AbstractContextManager[bool]:
    """Whether nobody else folds or forgets in a store's folder until the context ends."""
    return _file_lock(folder, ".fold", wait=wait)


@contextlib.contextmanager
def _file_lock(folder: Path, name: str, *, wait: bool) -> Iterator[bool]:
    """Whether the lock is held; it is freed when a process dies.

    Raises `StoreError` if the folder cannot be written.
    """
    path = folder / DELTA / name
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        except BlockingIOError:
            held = False
        except OSError as error:
            raise StoreError(f"{path}: cannot be written ({error})") from error
        yield held
