"""A redis-server of the benchmark's own, which keeps its data when it is killed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from .....core.errors import DraftlineError
from .owned_server import OwnedServer

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
