"""The processes of stage actors on this machine."""

from __future__ import annotations

from pathlib import Path


def stage_pids() -> list[int]:
    """Oldest first."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if command.startswith(b"ray::StageWorker"):
                found.append(int(folder.name))
    return sorted(found)
