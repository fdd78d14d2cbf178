"""Time by a store's own clock, which all who write to it share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# Between two readings of a store's clock; this process's monotonic clock fills the gap.
READING_SECONDS = 60.0


class StoreClock:
    """Seconds since the epoch, whatever this process's own clock says.

    read  asks the store; raises `StoreError`. None: it has no clock, now at least, and this
          process's own is used
    """

    def __init__(self, read: Callable[[], float | None]) -> None:
        self._read = read
        self._changing = threading.Lock()
        self._read_at = float("-inf")
        self._ahead = 0.0

    def now(self) -> float:
        """Seconds since the epoch. Raises `StoreError` if the store is out of reach."""
        with self._changing:
            if time.monotonic() - self._read_at > READING_SECONDS:
                seconds = self._read()
                if seconds is None:
                    return time.time()
                self._ahead = seconds - time.monotonic()
                self._read_at = time.monotonic()
            return time.monotonic() + self._ahead
