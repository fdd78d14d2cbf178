"""Processes on this machine, by their command lines."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path


def stage_pids() -> list[int]:
    """Processes of this process's stage actors that serve, oldest first; no spare ones."""
    return _actor_pids(b"ray::StageWorker.serve")


def stage_worker_pids() -> list[int]:
    """Processes of this process's stage actors, spare ones and those of any transport."""
    return _actor_pids(b"ray::StageWorker")


def coordinator_pids() -> list[int]:
    """Processes of this process's engine replicas on Ray Serve, oldest first."""
    return _actor_pids(b"ray::ServeReplica:draftline:engine")


def pool_server_pids(pool: str) -> list[int]:
    """Processes of this process's drafter servers in a pool on Ray Serve, oldest first."""
    return _actor_pids(b"ray::ServeReplica:%b:drafter" % pool.encode())


def drafter_actor_pids() -> list[int]:
    """Processes of drafter actors, oldest first."""
    return sorted(pid for pid, command in _commands() if command.startswith(b"ray::DrafterActor"))


def drafter_pids() -> list[int]:
    """This process's drafter servers."""
    return [
        pid
        for pid, command in _commands()
        if b"draftline.actors.drafter_server" in command and _parent(pid) == os.getpid()
    ]


def api_pids(server: int) -> list[int]:
    """Processes of the HTTP API of the server with this process id, oldest first."""
    module = b"draftline.deploy.cli.serve.api_process"
    return sorted(
        pid for pid, command in _commands() if module in command and _parent(pid) == server
    )


def num_connections(pid: int, port: int) -> int:
    """How many connections to a port of this machine a process has taken."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}")}
    # Listening sockets are in state 0A.
    ours -= {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    return sum(_link(file) in ours for file in Path(f"/proc/{pid}/fd").iterdir())


def _link(file: Path) -> str:
    try:
        return str(file.readlink())
    except FileNotFoundError:
        return ""


def _actor_pids(title: bytes) -> list[int]:
    # Others may run a Ray on this machine, too.
    pids = [pid for pid, command in _commands() if command.startswith(title)]
    return sorted(pid for pid in pids if os.getpid() in _ancestors(pid))


def _ancestors(pid: int | None) -> Iterator[int]:
    while pid and (pid := _parent(pid)):
        yield pid


def _commands() -> Iterator[tuple[int, bytes]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                yield int(folder.name), (folder / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[1])


def is_alive(pid: int) -> bool:
    """Whether there is such a process, stopped ones included."""
    return Path(f"/proc/{pid}").exists()


def send_signal(pid: int, number: int) -> None:
    """Send a process a signal. Of SIGSTOP, return when all its threads have stopped: on a busy
    machine the others go on, and answer, until one of them has run."""
    os.kill(pid, number)
    while number == signal.SIGSTOP and not _is_stopped(pid):
        time.sleep(0.001)


def _is_stopped(pid: int) -> bool:
    """Whether no thread of a process runs or waits any more. One that ended is stopped, too."""
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            state = thread.read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "TZX":
            return False
    return True
