"""One child process that serves gRPC at a port of the loopback interface."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO

from ..core.errors import DrafterError

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "DRAFTLINE_SERVER_TOKEN"
READY = "ready port="
STOP_TIMEOUT_S = 5.0
# Within this time, the output of an ended process has been read.
LAST_WORDS_S = 2.0
MAX_LINE_CHARS = 2000
MAX_LINES = 20
PERIOD_S = 10.0
LAST_LINES = 20


class ChildServer:
    """Starts `python -m module` at once, which prints `ready port=N` when it listens.

    Its output goes to this process's log, rate-limited. It always ends with this process, because
    its standard input is closed then.

    name       in the log
    arguments  of the module; never secrets, since every user of the machine sees them
    settings   the first line of its standard input
    token      that calls must carry; passed in its environment
    """

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], settings: str, token: str
    ) -> None:
        self._name = name
        self._settings = settings
        self._ready = threading.Event()
        self._port: int | None = None
        # Its own session: Ctrl-C in the terminal reaches this process, which ends its children.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, "--token-env", TOKEN_VARIABLE, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, TOKEN_VARIABLE: f"{token} *"},
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stderr is not None
        self._errors = LineDrain(self._process.stderr, f"drafter={name}")
        self._errors.start()
        threading.Thread(target=self._talk, name=f"child-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Id of its process."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def wait_ready(self, timeout_s: float) -> int:
        """The port, once it listens. Raises `DrafterError` if it ends or takes longer."""
        is_told = self._ready.wait(timeout_s)
        if self._port is not None:
            return self._port
        self.kill()
        if not is_told:
            raise DrafterError(f"its process said nothing within {timeout_s:g} s, and was ended")
        reason = self._errors.last_line(LAST_WORDS_S).removeprefix("drafter_server: ")
        raise DrafterError(reason or f"its process ended with status {self._process.returncode}")

    def stop(self) -> None:
        """End the process, by SIGKILL after `STOP_TIMEOUT_S`; may be called twice."""
        self._process.terminate()
        # A paused process would not receive the signal.
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._close_stdin()

    def kill(self) -> None:
        """Kill the process at once, even if it is paused; may be called twice."""
        self._process.kill()
        self._process.wait()
        self._close_stdin()

    def _talk(self) -> None:
        """Send the settings, read the port, and keep reading the output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            # The pipe stays open: closing it would end the server.
            self._process.stdin.write(self._settings + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            # The process has already ended; its standard error has the reason.
            logger.debug("drafter=%s event=settings_not_read", self._name)
        line = self._process.stdout.readline(len(READY) + 8)
        if line.startswith(READY):
            self._port = int(line.removeprefix(READY))
        self._ready.set()
        LineDrain(self._process.stdout, f"drafter={self._name}").run()

    def _close_stdin(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            # The dead process never read the settings.
            logger.debug("drafter=%s event=settings_not_read", self._name)


class LineDrain:
    """Copies the lines of a pipe to this process's log, at most `MAX_LINES` in `PERIOD_S` seconds.

    Further lines are read and only counted. Begins with `start`, and ends with the pipe.

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
            # In bounded chunks: an endless line must not fill the memory.
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
