"""The folders in which a `DirectoryStore` keeps its namespaces, and files replaced at once.

Lower-case letters, digits, `_` and `-` stay; any other character becomes `=` and two hexadecimal
digits. So no folder has the name of a store file, and namespaces do not collide on case-insensitive
file systems. Older versions used the plain namespace as the folder's name; such folders are only
read.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from ..store import NAMESPACE

# The one file of the store whose name has no leading dot.
LOCK = "lock"
PLAIN = re.compile(r"[a-z0-9_-]")
ENCODED = re.compile(r"(?:[a-z0-9_-]|=[0-9a-f]{2})+")


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
