"""A real redis-server on a port of the system's choice."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path
from typing import Self

import pytest
import redis
from draftline.cluster.links.access import TlsFiles


class RedisServer:
    """Starts, kills and starts again one redis-server; runs within `with`.

    options  of its command line; without any, its data lives in memory only
    tls      certificates for both sides; without them it speaks plain text
    """

    def __init__(self, folder: Path, *options: str, tls: TlsFiles | None = None) -> None:
        if shutil.which("redis-server") is None:
            pytest.fail("redis-server is not installed; `make redis` installs it")
        self._folder = folder
        self._options = options
        self._tls = tls
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://127.0.0.1:{self.port}/0"
        if tls is not None:
            self.url = (
                f"rediss://localhost:{self.port}/0"
                f"?ssl_ca_certs={tls.ca}&ssl_certfile={tls.certificate}&ssl_keyfile={tls.key}"
            )

    def start(self) -> None:
        """Start, and wait until it answers."""
        command = ["redis-server", "--bind", "127.0.0.1", *self._port_options()]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder), *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if b"Ready to accept connections" in line:
                return
        raise AssertionError("redis-server did not start")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()

    def _port_options(self) -> list[str]:
        if self._tls is None:
            return ["--port", str(self.port)]
        files = {"ca-cert": self._tls.ca, "cert": self._tls.certificate, "key": self._tls.key}
        named = [text for name, path in files.items() for text in (f"--tls-{name}-file", str(path))]
        return ["--port", "0", "--tls-port", str(self.port), *named]

    def kill(self) -> None:
        """Kill it, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def raw(self) -> redis.Redis:
        """A plain client."""
        return self.client(self.url)

    @staticmethod
    def client(url: str) -> redis.Redis:
        """A plain client of any server."""
        return redis.Redis.from_url(url)
