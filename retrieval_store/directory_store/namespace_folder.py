"""The folders in which a `DirectoryStore` keeps its namespaces, and files replaced at once.

Lower-case letters, digits, `_` and `-` stand for themselves, every other character for `=` and its
two hexadecimal digits. So no folder has the name of a file of the store, and no two namespaces
share one where the system does not tell upper from lower case. Older versions named folders
like the namespaces themselves; those are read, and not written.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from ..store import NAMESPACE

# The store's own file without a dot.
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
    """The folder of a namespace as older versions named it, if it is there by that very name."""
    if namespace == folder_name(namespace):
        return None
    try:
        # By that very name, also where the system takes another case for it.
        return next((path for path in parent.iterdir() if path.name == namespace), None)
    except OSError:
        return None


def replace_file(path: Path, content: bytes | memoryview) -> None:
    """Put `content` in the place of `path`, which readers see before or after. Raises `OSError`."""
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
    """Make renames in it outlast a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
