"""Servers that a soak has of its own: Redis, drafters, and the disk and the network between."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ....core.errors import DraftlineError


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


SIZE = "512m"
PIECE = bytes(1 << 20)


class Disk:
    """A file system in memory at `folder`, within `with`; a plain folder where none may be mounted.

    is_own  whether it is a file system of its own, which alone may be filled
    """

    def __init__(self, folder: Path, size: str = SIZE) -> None:
        self.folder = folder
        self._size = size
        self.is_own = False

    def __enter__(self) -> Self:
        self.folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={self._size}", "tmpfs", str(self.folder)]
        with suppress(OSError):
            self.is_own = not subprocess.run(command, capture_output=True, check=False).returncode
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_own:
            # Lazily: whoever is still there must not keep it.
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)

    def fill(self) -> None:
        """Take all the room that is left, to the last byte."""
        with suppress(OSError), self._filling.open("wb", buffering=0) as file:
            # A write that finds less room than it needs writes less; the next one is refused.
            while file.write(PIECE):
                pass

    def free(self) -> None:
        """Give it back."""
        self._filling.unlink(missing_ok=True)

    @property
    def _filling(self) -> Path:
        return self.folder / "filling"


PIECE_BYTES = 16_384


class NetworkProxies:
    """Carries connections to a port. Runs within `with`.

    delay_s  each piece of at most 16 KiB takes so long, one after the other in each direction
    """

    def __init__(self, target_port: int) -> None:
        self._target = ("127.0.0.1", target_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.delay_s = 0.0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._target)
        except OSError:
            # As a port that nobody listens at: the other side hears of it at once.
            near.close()
            return
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=self._carry, args=(far, near), daemon=True)
        back.start()
        self._carry(near, far)
        back.join()
        near.close()
        far.close()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                time.sleep(self.delay_s)
                sink.sendall(piece)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


START_TIMEOUT_S = 60.0
POLL_S = 0.1


class RedisServer(OwnedServer):
    """Its data lie in `folder`. Raises `DraftlineError` where none starts."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("redis-server") is None:
            raise DraftlineError("redis-server is not installed; `make redis` installs it")
        super().__init__()
        self._folder = folder
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._client = redis.Redis.from_url(self.url, retry=Retry(NoBackoff(), 0))

    @property
    def command(self) -> Sequence[str]:
        """See `OwnedServer`."""
        own = ("redis-server", "--bind", "127.0.0.1", "--port", str(self.port))
        return (*own, "--save", "", "--appendonly", "yes", "--dir", str(self._folder))

    def start(self) -> None:
        """Start it with its data, and wait until it answers."""
        super().start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self.pid is None or time.monotonic() > deadline:
                raise DraftlineError("redis-server did not start")
            time.sleep(POLL_S)

    def _answers(self) -> bool:
        try:
            return bool(self._client.ping())
        except redis.RedisError:
            # It reads its data, or does not listen yet.
            return False


class OwnedDrafterServer(OwnedServer):
    """Of kind retrieval, over the store at `url`. It serves a little after its start."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    @property
    def command(self) -> Sequence[str]:
        """See `OwnedServer`."""
        module = ("-m", "draftline.actors.drafter_server")
        config = json.dumps({"kind": "retrieval", "store": self._url})
        return (sys.executable, *module, "--config", config, "--port", str(self.port))

    def revive(self) -> None:
        """Start it again if it has ended by itself: at its start it needs its store."""
        if self._process is not None and self.pid is None:
            self.lose()
            self.start()
