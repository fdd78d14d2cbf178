"""A redis-server of the benchmark's own, which keeps its data when it is killed."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path
from typing import Self

from ....core.errors import DraftlineError


class RedisServer:
    """Runs within `with`. Its data lie in `folder`. Raises `DraftlineError` where none starts."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("redis-server") is None:
            raise DraftlineError("redis-server is not installed; `make redis` installs it")
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its process; None: it does not run."""
        return None if self._process is None else self._process.pid

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def restart(self) -> None:
        """Start it again with its data, as a supervisor does after a crash."""
        self._kill()
        self._start()

    def _start(self) -> None:
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(self._port)]
        command += ["--save", "", "--appendonly", "yes", "--dir", str(self._folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if b"Ready to accept connections" in line:
                return
        raise DraftlineError("redis-server did not start")

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None
