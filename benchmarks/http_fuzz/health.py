"""How long `/health` takes, all the while."""

from __future__ import annotations

import http.client
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from .server import Server, cpu_seconds

PERIOD_S = 0.02
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Poll:
    """How long an answer took, when it was asked for (`time.monotonic`), and how long the server's
    threads computed meanwhile, all together."""

    seconds: float
    begun: float
    cpu_s: float


class HealthWatch:
    """Asks for `/health` again and again, in a thread of its own, over one connection.

    polls   every answer
    faults  answers that were not 200
    """

    def __init__(self, server: Server) -> None:
        address = urlsplit(server.url)
        self._pid = server.pid
        self._host, self._port = address.hostname or "", address.port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.polls: list[Poll] = []
        self.faults: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def slowest(self) -> Poll:
        """The slowest answer."""
        return max(self.polls, key=lambda poll: poll.seconds, default=Poll(0.0, 0.0, 0.0))

    def _run(self) -> None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        while not self._stop.wait(PERIOD_S):
            begun, cpu_s = time.monotonic(), cpu_seconds(self._pid)
            try:
                connection.request("GET", "/health")
                answer = connection.getresponse()
                body = answer.read()
            except (OSError, http.client.HTTPException) as error:
                # A full server may close an idle connection just when a request comes.
                is_late = time.monotonic() - begun >= TIMEOUT_S
                if is_late or not isinstance(error, ConnectionError):
                    self.faults.append(f"/health: {type(error).__name__}")
                connection.close()
                continue
            seconds = time.monotonic() - begun
            self.polls.append(Poll(seconds, begun, cpu_seconds(self._pid) - cpu_s))
            if answer.status != http.client.OK and b"all of them busy" not in body:
                self.faults.append(f"/health: {answer.status}")
        connection.close()
