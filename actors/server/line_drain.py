"""Reads what a child process writes, so that it never waits for its reader."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO

logger = logging.getLogger(__name__)

MAX_LINE_CHARS = 2000
MAX_LINES = 20
PERIOD_S = 10.0
LAST_LINES = 20


class LineDrain:
    """Hands the lines of a pipe to this process's log, at most `MAX_LINES` in `PERIOD_S` seconds.

    Lines beyond that are read and counted. Begins with `start`, and ends with the pipe.

    subject  begins each line of the log
    clock    seconds; only differences count
    """

    def __init__(
        self, pipe: IO[str], subject: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pipe = pipe
        self._subject = subject
        self._clock = clock
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._period_ends = 0.0
        self._num_logged = self._num_left_out = 0
        self._thread = threading.Thread(target=self.run, name="drain", daemon=True)

    def start(self) -> None:
        """Read in a thread of its own."""
        self._thread.start()

    def last_line(self, timeout_s: float) -> str:
        """The last line, once the pipe is closed or `timeout_s` is over; empty if there is none."""
        self._thread.join(timeout_s)
        return self._last[-1] if self._last else ""

    def run(self) -> None:
        """Read in this thread until the pipe ends."""
        with self._pipe:
            # Not line by line: one that never ends must not fill the memory.
            while line := self._pipe.readline(MAX_LINE_CHARS):
                self._take(line.rstrip())
        self._say_left_out()

    def _take(self, line: str) -> None:
        if not line:
            return
        self._last.append(line)
        now = self._clock()
        if now >= self._period_ends:
            self._say_left_out()
            self._period_ends, self._num_logged = now + PERIOD_S, 0
        if self._num_logged < MAX_LINES:
            self._num_logged += 1
            logger.warning("%s %s", self._subject, line)
        else:
            self._num_left_out += 1

    def _say_left_out(self) -> None:
        if self._num_left_out:
            logger.warning("%s event=lines_left_out count=%d", self._subject, self._num_left_out)
            self._num_left_out = 0
