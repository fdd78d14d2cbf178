"""The learning policy of a folder: `.learning.json` beside its manifest."""

from __future__ import annotations

import json
from pathlib import Path

from ...core.errors import StoreError
from ..learning.erasure import check_learned
from .locks import log_lock
from .namespace_folder import replace_file

# No namespace begins with a dot.
POLICY = ".learning.json"


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
