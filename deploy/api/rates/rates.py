"""Rates over a sliding minute, counted by the `limits` library in memory or in Redis.

The minute slides as the library's "sliding window counter" does: the count of the minute that runs,
and of the one before it the part that the last 60 s still cover.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from limits.aio.storage import Storage
from limits.aio.storage.base import SlidingWindowCounterSupport

from .verdict import Kind, Rate

WINDOW_S = 60
# Above any count: what has been generated is charged also where nothing is left.
NO_LIMIT = 2**53


@dataclass(frozen=True, slots=True)
class Window:
    """Counts of the minute before and of the one that runs, and seconds until each is over.

    `now_left_s` counts to the end of the minute after the running one, as the library has it.
    """

    before: int
    before_left_s: float
    now: int
    now_left_s: float

    @property
    def used(self) -> float:
        """What the last 60 s hold."""
        return self.before * self.before_left_s / WINDOW_S + self.now

    @property
    def reset_s(self) -> float:
        """Until nothing is used."""
        if self.now:
            return self.now_left_s
        return self.before_left_s if self.before else 0.0

    def wait_s(self, limit: int, cost: int) -> float:
        """Until `cost` fits, if nothing else comes; infinite where it never does."""
        room = limit - cost
        if room < 0:
            return math.inf
        if math.floor(self.used) <= room:
            return 0.0
        if self.now <= room:
            # The minute before runs out.
            return self.before_left_s - (room - self.now) * WINDOW_S / self.before
        # Then the running one does, once it is the one before.
        until_next = max(self.now_left_s - WINDOW_S, 0.0)
        return until_next + WINDOW_S * (1 - room / self.now)


class Rates:
    """Counts of all tenants in one storage. What the storage raises is passed on."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._windows = cast("SlidingWindowCounterSupport", storage)

    async def take(self, kind: Kind, tenant: str, limit: int, cost: int) -> tuple[bool, Rate]:
        """Count `cost` if it fits; whether it did, and where the tenant stands then."""
        key = _key(kind, tenant)
        is_taken = await self._windows.acquire_sliding_window_entry(key, limit, WINDOW_S, cost)
        found = await self._windows.get_sliding_window(key, WINDOW_S)
        window = Window(*(max(value or 0, 0) for value in found))  # pyright: ignore[reportArgumentType]
        left = max(limit - math.floor(window.used), 0)
        wait_s = 0.0 if is_taken else max(window.wait_s(limit, cost), 0.001)
        return is_taken, Rate(limit=limit, remaining=left, reset_s=window.reset_s, wait_s=wait_s)

    async def charge(self, kind: Kind, tenant: str, cost: int) -> None:
        """Count what has happened already, whatever is left."""
        await self._windows.acquire_sliding_window_entry(
            _key(kind, tenant), NO_LIMIT, WINDOW_S, cost
        )


def _key(kind: Kind, tenant: str) -> str:
    """Without the limit: a change of it forgets nothing."""
    return f"draftline/{kind}/{tenant}"
