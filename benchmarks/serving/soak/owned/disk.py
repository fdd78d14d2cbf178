"""A small disk of the benchmark's own, which can be filled."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Self

SIZE = "512m"
PIECE = bytes(1 << 20)


class Disk:
    """A file system in memory at `folder`, within `with`; a plain folder where none may be mounted.

    is_own  whether it is a file system of its own, which alone may be filled
    """

    def __init__(self, folder: Path, size: str = SIZE) -> None:
        self.folder = folder
        self._size = size
        self.is_own = False

    def __enter__(self) -> Self:
        self.folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={self._size}", "tmpfs", str(self.folder)]
        with suppress(OSError):
            self.is_own = not subprocess.run(command, capture_output=True, check=False).returncode
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_own:
            # Lazily: whoever is still there must not keep it.
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)

    def fill(self) -> None:
        """Take all the room that is left, to the last byte."""
        with suppress(OSError), self._filling.open("wb", buffering=0) as file:
            # A write that finds less room than it needs writes less; the next one is refused.
            while file.write(PIECE):
                pass

    def free(self) -> None:
        """Give it back."""
        self._filling.unlink(missing_ok=True)

    @property
    def _filling(self) -> Path:
        return self.folder / "filling"
