"""Where compiled code is kept depends on the package's own sources alone."""

from __future__ import annotations

from pathlib import Path

import draftline
import pytest
from draftline.core import compiled


def test_virtual_environments_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout has one, of hundreds of megabytes, which each process would read at its start."""
    read: list[Path] = []

    def read_bytes(file: Path) -> bytes:
        read.append(file)
        return b""

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    compiled._own_folder.__wrapped__()
    package = Path(str(draftline.__file__)).parent
    parts = {file.relative_to(package).parts[0] for file in read}
    assert "core" in parts
    assert not any(part.startswith(".") for part in parts)
