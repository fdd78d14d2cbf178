"""Nodes of a Ray cluster on this machine, started as an operator does; one of them may be lost."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from ....deploy.ray_serve.runtime import RAY_ENVIRONMENT
from .processes import tree

COMMAND = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block")
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
        self._command = [*COMMAND, *options, "--disable-usage-stats", "--include-log-monitor=false"]
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
