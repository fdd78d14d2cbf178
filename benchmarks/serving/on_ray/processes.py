"""Processes of a server on this machine, by their titles, and what each holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Titles that Ray gives the processes.
TITLES = {
    "stage": b"ray::StageWorker.serve",
    "drafter": b"ray::DrafterActor",
    "coordinator": b"ray::ServeReplica:draftline:engine",
    "ingress": b"ray::ServeReplica:draftline:ingress",
}
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """A process and what it holds.

    role     the title that Ray gave it, or the name of its program; Python's with what it runs
    started  clock ticks since the machine's start: with the id it names the process for good
    """

    pid: int
    started: int
    role: str
    threads: int
    fds: int


def pids_of(victim: str, *roots: int) -> list[int]:
    """The processes of one of `TITLES` that came of one of these processes, oldest first."""
    found = []
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                is_one = (folder / "cmdline").read_bytes().startswith(TITLES[victim])
                if is_one and not set(roots).isdisjoint(_ancestors(int(folder.name))):
                    found.append(int(folder.name))
    return sorted(found)


def tree(*roots: int) -> list[Process]:
    """These processes and all that came of them, as far as they still run."""
    found = []
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                pid = int(folder.name)
                if not set(roots).isdisjoint((pid, *_ancestors(pid))):
                    found.append(_process(folder))
    return found


def still_there(processes: list[Process]) -> list[Process]:
    """Those of these processes that have not ended; one that nobody has waited for has."""
    return [process for process in processes if _is_same(process)]


def _is_same(process: Process) -> bool:
    with suppress(OSError):
        fields = _stat(PROC / str(process.pid))
        return int(fields[19]) == process.started and fields[0] != "Z"
    return False


def _process(folder: Path) -> Process:
    fields = _stat(folder)
    return Process(
        pid=int(folder.name),
        started=int(fields[19]),
        role=_role((folder / "cmdline").read_bytes().decode(errors="replace").split("\0")),
        threads=int(fields[17]),
        fds=len(list((folder / "fd").iterdir())),
    )


def _role(command: Sequence[str]) -> str:
    program = command[0].rpartition("/")[2]
    if program.startswith("ray::"):
        # Titles end with the method that runs.
        return program.partition(".")[0]
    words = [word.rpartition("/")[2] for word in command[1:] if not word.startswith("-")]
    return " ".join([program, *words[:1]]) if program.startswith("python") else program or "ended"


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        pid = int(_stat(PROC / str(pid))[1])
        yield pid


def _stat(folder: Path) -> list[str]:
    """Fields of a process from its state on, the third of `man proc`."""
    return (folder / "stat").read_text().rpartition(")")[2].split()
