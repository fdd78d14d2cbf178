"""A retrieval server of the benchmark's own, which comes back at the same port."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Self

COMMAND = (sys.executable, "-m", "draftline.actors.retrieval_server")


class RetrievalServer:
    """Runs within `with`, over the store at `url`."""

    def __init__(self, url: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._command = [*COMMAND, "--store", url, "--port", str(self.port)]
        self._process: subprocess.Popen[bytes] | None = None

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
        """Start it, as a supervisor does after a crash; it serves a little later."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def revive(self) -> None:
        """Start it again if it has ended by itself: at its start it needs its store."""
        if self._process is not None and self.pid is None:
            self.lose()
            self.start()

    def lose(self) -> None:
        """End it at once; twice is once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
