"""Simulated time: the processor time of one thread, with waits skipped."""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class HostClock:
    """Seconds of a simulation: the processor time of its thread, plus its waits, which take no real
    time.

    So other load on the machine only affects caches. Its thread is the one that runs its
    `HostLoop`; other threads get that thread's last reading.
    slowdown  processor seconds here for each second there
    """

    def __init__(self, slowdown: float = 1.0) -> None:
        self._slowdown = slowdown
        self._waited_s = self._uncounted_s = 0.0
        self._begun_at = 0.0
        self._stopped_at: float | None = None
        self._owner: int | None = None
        self._last = 0.0

    def __call__(self) -> float:
        """Seconds since the beginning."""
        if self._stopped_at is not None:
            return self._stopped_at
        if threading.get_ident() != self._owner:
            return self._last
        self._last = self._waited_s + self.worked_s
        return self._last

    def own(self) -> None:
        """Count the calling thread's work from now on, unless a thread is set already."""
        if self._owner is None:
            self._owner = threading.get_ident()
            self._begun_at = time.thread_time()

    @property
    def worked_s(self) -> float:
        """Seconds of work of the host; only for its own thread."""
        return (time.thread_time() - self._begun_at - self._uncounted_s) / self._slowdown

    def wait(self, seconds: float) -> None:
        """Advance the clock by this many seconds without work."""
        self._waited_s += seconds

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """A context for work that other machines would do: it does not advance the clock."""
        self._stopped_at, began_at = self(), time.thread_time()
        try:
            yield
        finally:
            self._uncounted_s += time.thread_time() - began_at
            self._stopped_at = None


class _WaitingSelector(selectors.SelectSelector):
    """A selector that sleeps in simulated time."""

    def __init__(self, clock: HostClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return ready events at once; without timers, wait for another thread, in no simulated
        time."""
        if timeout is None:
            return super().select()
        if timeout > 0:
            self._clock.wait(timeout)
        return super().select(0)


class HostLoop(asyncio.SelectorEventLoop):
    """An event loop in the time of a clock."""

    def __init__(self, clock: HostClock) -> None:
        super().__init__(_WaitingSelector(clock))
        self._host_clock = clock

    def run_forever(self) -> None:
        """Run in the clock's thread."""
        self._host_clock.own()
        super().run_forever()

    def time(self) -> float:
        """Seconds by the clock."""
        return self._host_clock()
