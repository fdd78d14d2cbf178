"""Notices that a thread is stuck, from another one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# How often it looks.
PERIOD_S = 0.25


class Watchdog:
    """Tells once when a piece of work takes longer than its limit.

    clock    seconds that never go back
    on_hang  called in the watchdog's thread with how long the work has taken
    """

    def __init__(self, clock: Callable[[], float], on_hang: Callable[[float], None]) -> None:
        self._clock = clock
        self._on_hang = on_hang
        # When the work began, and how long it may take; one value, so that both are of one work.
        self._work: tuple[float, float] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftline-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    @contextmanager
    def watching(self, limit_s: float) -> Iterator[None]:
        """The block is work that may take `limit_s` seconds."""
        self._work = (self._clock(), limit_s)
        try:
            yield
        finally:
            self._work = None

    def close(self) -> None:
        """Look no more; twice is once."""
        self._closed.set()

    def look(self) -> bool:
        """Whether the work has taken too long; tells if so."""
        work = self._work
        if work is None:
            return False
        began, limit_s = work
        seconds = self._clock() - began
        if seconds <= limit_s:
            return False
        self._on_hang(seconds)
        return True

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            if self.look():
                return
