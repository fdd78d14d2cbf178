"""How much a drafter server has to do: how long it works, and how many messages wait meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Work(NamedTuple):
    """Means over a period.

    busy     share of the time that the drafter worked, 0 to 1
    waiting  messages that waited for it
    """

    busy: float
    waiting: float


class WorkMeter:
    """Follows the messages at a server that works on one at a time, in the order of arrival.

    clock  seconds; only differences count
    """

    __slots__ = ("_busy_s", "_clock", "_num_messages", "_read_at", "_seen_at", "_waiting_s")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_messages = 0
        self._read_at = self._seen_at = clock()
        self._busy_s = self._waiting_s = 0.0

    def enter(self) -> None:
        """A message arrived."""
        self._catch_up()
        self._num_messages += 1

    def leave(self) -> None:
        """A message is done."""
        self._catch_up()
        self._num_messages -= 1

    def read(self) -> Work:
        """The means since the last reading; there is one reader."""
        self._catch_up()
        took_s = self._seen_at - self._read_at
        work = Work(self._busy_s / took_s, self._waiting_s / took_s) if took_s > 0 else Work(0, 0)
        self._read_at, self._busy_s, self._waiting_s = self._seen_at, 0.0, 0.0
        return work

    def _catch_up(self) -> None:
        now = self._clock()
        since_s, self._seen_at = now - self._seen_at, now
        if self._num_messages:
            self._busy_s += since_s
            self._waiting_s += since_s * (self._num_messages - 1)
