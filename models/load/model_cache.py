"""Where draftline keeps models that it fetched or unpacked."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...core.errors import CheckpointError

CACHE = Path("~/.cache/draftline/models").expanduser()


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, which takes its place once the block has ended well.

    So nobody finds half of it. Raises `CheckpointError` where the disk is full or read-only.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise CheckpointError(f"{folder.parent} cannot be written: {error.strerror}") from error
    try:
        yield fresh
        fresh.chmod(0o755)
        fresh.rename(folder)
    except OSError as error:
        # Another process was quicker.
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise CheckpointError(f"{folder} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
