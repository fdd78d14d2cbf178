"""Processor time of a server: of its process, and of all that it started (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
# Places in /proc/PID/stat behind the name, which may hold blanks and brackets.
PARENT, SESSION = 1, 3
TICKS = slice(11, 15)


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """A process: who started it, its session, and ticks of it and of its ended children."""

    pid: int
    parent: int
    session: int
    ticks: int


def cpu_seconds(leader: int, proc: Path = PROC) -> float | None:
    """Processor seconds of the session that `leader` leads and of all its descendants.

    Children that ended count once their parents have waited for them. None where there is no /proc.
    """
    if not (proc / "self").exists():
        return None
    ticks = sum(one.ticks for one in belonging(leader, read_processes(proc)))
    return ticks / os.sysconf("SC_CLK_TCK")


def belonging(leader: int, processes: Iterable[ProcessTimes]) -> list[ProcessTimes]:
    """Those of the leader's session, and what they started, at any depth."""
    rest, found, known = list(processes), [], {leader}
    while True:
        more = [one for one in rest if leader in {one.pid, one.session} or one.parent in known]
        if not more:
            return found
        found += more
        known |= {one.pid for one in more}
        rest = [one for one in rest if one.pid not in known]


def read_processes(proc: Path = PROC) -> list[ProcessTimes]:
    """Every process there is; one that ends meanwhile is left out."""
    found = []
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks = sum(map(int, fields[TICKS]))
        found.append(
            ProcessTimes(int(folder.name), int(fields[PARENT]), int(fields[SESSION]), ticks)
        )
    return found
