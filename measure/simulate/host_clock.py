"""Time that passes as one thread's processor works, and as fast as it can where nobody works."""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class HostClock:
    """Seconds of a simulation: what its thread computed, and what it waited, which takes no time.

    So others on the machine disturb nothing but caches. Its thread is the one that runs a
    `HostLoop` of it; others read what that thread read last.
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
        """The calling thread's work counts from now on, if none's did so far."""
        if self._owner is None:
            self._owner = threading.get_ident()
            self._begun_at = time.thread_time()

    @property
    def worked_s(self) -> float:
        """Seconds that the host worked; for its own thread."""
        return (time.thread_time() - self._begun_at - self._uncounted_s) / self._slowdown

    def wait(self, seconds: float) -> None:
        """Nobody works for so long."""
        self._waited_s += seconds

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Work that other machines would do: it takes no time."""
        self._stopped_at, began_at = self(), time.thread_time()
        try:
            yield
        finally:
            self._uncounted_s += time.thread_time() - began_at
            self._stopped_at = None


class _WaitingSelector(selectors.SelectSelector):
    """Sleeps by the clock."""

    def __init__(self, clock: HostClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready, at once; without timers, what a thread brings, which takes no time."""
        if timeout is None:
            return super().select()
        if timeout > 0:
            self._clock.wait(timeout)
        return super().select(0)


class HostLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is that of a clock."""

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
