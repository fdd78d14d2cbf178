"""A real redis-server on a port of the system's choice."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import redis


class RedisServer:
    """Starts, kills and starts again one redis-server; its data lives in memory only."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("redis-server") is None:
            pytest.fail("redis-server is not installed; `make redis` installs it")
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://127.0.0.1:{self._port}/0"

    def start(self) -> None:
        """Start, and wait until it answers."""
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(self._port)]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if b"Ready to accept connections" in line:
                return
        raise AssertionError("redis-server did not start")

    def kill(self) -> None:
        """Kill it, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def flush(self) -> None:
        """Forget all data."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    def raw(self) -> redis.Redis:
        """A plain client."""
        return redis.Redis.from_url(self.url)
