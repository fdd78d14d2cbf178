"""Servers on Ray: nodes of a cluster on this machine, processes of it, and an API beside them."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from ...deploy.ray_serve.runtime import RAY_ENVIRONMENT

RAY_START = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block")
OBJECT_STORE_BYTES = 128 * 1024 * 1024
# Ray gives a node 30 seconds to come up, which a busy machine may need more than once.
START_ATTEMPTS = 10
READY = b"runtime started"


class Node:
    """One `ray start`; it runs from `start` to `lose`, which is as if its machine lost its power.

    options  of `ray start`
    """

    def __init__(self, options: tuple[str, ...], environment: Mapping[str, str]) -> None:
        # Nobody reads what a log monitor would send, which holds open what it reads.
        self._command = [
            *RAY_START,
            *options,
            "--disable-usage-stats",
            "--include-log-monitor=false",
        ]
        self._environment = os.environ | RAY_ENVIRONMENT | dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its first process; None: it does not run."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it and wait until it runs. Raises `RuntimeError`."""
        said: str | None = None
        for _ in range(START_ATTEMPTS):
            said = self._start()
            if said is None:
                return
            self.lose()
        raise RuntimeError(f"a Ray node did not start: {said[-500:] if said else said}")

    def _start(self) -> str | None:
        """What it said, if it does not run; else None."""
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        said = b""
        for line in self._process.stdout:
            said += line
            if READY in line:
                return None
        return said.decode(errors="replace")

    def lose(self) -> None:
        """End all its processes at once; twice is once."""
        if self._process is None:
            return
        for process in tree(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None


class Cluster:
    """A head and one further node. Runs within `with`.

    cpus         of each, as Ray counts them
    folder       for Ray's session; its name must be short
    environment  of all processes that Ray starts
    """

    def __init__(self, cpus: tuple[int, int], folder: Path, environment: Mapping[str, str]) -> None:
        self.address = f"127.0.0.1:{_free_port()}"
        # Ray asks whoever joins for it. Drivers need it, too.
        self.environment = dict(environment) | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        port = self.address.rpartition(":")[2]
        alike = ("--object-store-memory", str(OBJECT_STORE_BYTES), "--temp-dir", str(folder))
        head = ("--head", "--node-ip-address", "127.0.0.1", "--port", port, *alike)
        beside = ("--address", self.address, "--node-ip-address", "127.0.0.1", *alike[:2])
        self.head = Node(
            (*head, "--include-dashboard", "false", "--num-cpus", str(cpus[0])), self.environment
        )
        self.node = Node((*beside, "--num-cpus", str(cpus[1])), self.environment)
        self._ending = ExitStack()

    def __enter__(self) -> Self:
        with self._ending:
            for node in (self.head, self.node):
                self._ending.callback(node.lose)
                node.start()
            self._ending = self._ending.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The first processes of those that run."""
        pids = (self.head.pid, self.node.pid)
        return tuple(pid for pid in pids if pid is not None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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


COMMAND = (sys.executable, "-c", "from draftline.deploy.cli.main import main; main()")
STOP_TIMEOUT_S = 60.0
# Ray's own processes notice within this time that their driver is gone.
END_TIMEOUT_S = 20.0
# And one that is aborted has written where its threads are.
ABORT_TIMEOUT_S = 5.0
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class RayServer:
    """A server's address, without `/v1`, and its first process.

    left  once it was told to stop, and its first process has ended: those that had not
    """

    url: str
    pid: int
    left: list[Process] = field(default_factory=list)


@contextmanager
def served(
    settings: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    ray_address: str | None = None,
) -> Iterator[RayServer]:
    """A server with these settings at a free port; nothing of it is left at the end.

    ray_address  of a cluster that runs; None: the server starts one, which ends with it
    """
    with TemporaryDirectory() as folder:
        config = Path(folder) / "settings.json"
        config.write_text(json.dumps(settings))
        command = [*COMMAND, "serve", "--config", str(config), "--port", "0"]
        command += [] if ray_address is None else ["--ray-address", ray_address]
        # One that does not end says where it is (`_stop`).
        env = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        env |= dict(environment or {})
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            server = None
            try:
                server = RayServer(_address(process), process.pid)
                yield server
            finally:
                left = _stop(process)
                if server is not None:
                    server.left.extend(left)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"ready: (http://\S+)/v1", line):
            return found[1]
    raise RuntimeError("the server did not start")


def _stop(process: subprocess.Popen[str]) -> list[Process]:
    """Interrupt the server as a user does; what did not end of it, which is killed then."""
    processes = tree(process.pid)
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    deadline = time.monotonic() + END_TIMEOUT_S
    while (left := still_there(processes)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for one in left:
        with suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGABRT if one.pid == process.pid else signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(ABORT_TIMEOUT_S)
    process.kill()
    return left
