"""A server process of the benchmark's own, which comes back at its port."""

from __future__ import annotations

import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self


class OwnedServer(ABC):
    """Runs within `with`."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def command(self) -> Sequence[str]:
        """What runs it."""

    @property
    def pid(self) -> int | None:
        """Its process; None: it does not run."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.lose()

    def start(self) -> None:
        """Start it, as a supervisor does after a crash."""
        self._process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)

    def lose(self) -> None:
        """End it at once; twice is once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
