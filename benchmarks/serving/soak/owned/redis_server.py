"""A redis-server of the benchmark's own, which keeps its data when it is killed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from .....core.errors import DraftlineError

START_TIMEOUT_S = 60.0
POLL_S = 0.1


class RedisServer:
    """Runs within `with`. Its data lie in `folder`. Raises `DraftlineError` where none starts."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("redis-server") is None:
            raise DraftlineError("redis-server is not installed; `make redis` installs it")
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._client = redis.Redis.from_url(self.url, retry=Retry(NoBackoff(), 0))
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
        """Start it with its data, as a supervisor does after a crash."""
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port)]
        command += ["--save", "", "--appendonly", "yes", "--dir", str(self._folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise DraftlineError("redis-server did not start")
            time.sleep(POLL_S)

    def lose(self) -> None:
        """End it at once; twice is once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            return bool(self._client.ping())
        except redis.RedisError:
            # It reads its data, or does not listen yet.
            return False
