"""When a client that was refused should come again."""

from __future__ import annotations

import math
from collections import deque

# Shorter than this, a full queue is asked again and again; longer, clients give up.
MIN_RETRY_S = 1
MAX_RETRY_S = 60
# Where nothing has ended yet: whatever runs takes long.
UNKNOWN_RETRY_S = 5
# Requests that the rate is measured over.
WINDOW = 32


class FinishRate:
    """Requests that end a second, by the last ones. Times are seconds of one clock."""

    def __init__(self, window: int = WINDOW) -> None:
        self._ends: deque[float] = deque(maxlen=window)

    def finished(self, now: float) -> None:
        """A request has ended."""
        self._ends.append(now)

    def per_second(self, now: float) -> float:
        """The rate from the oldest end that is known until now; 0.0 before two have ended."""
        if len(self._ends) < 2 or now <= self._ends[0]:
            return 0.0
        return (len(self._ends) - 1) / (now - self._ends[0])


def retry_after_s(num_waiting: int, num_running: int, finished_per_s: float) -> int:
    """Whole seconds until as many requests as wait now have probably left the queue.

    A place is free at once where nothing waits or runs. Between `MIN_RETRY_S` and `MAX_RETRY_S`.
    """
    if num_waiting + num_running == 0:
        return MIN_RETRY_S
    if finished_per_s <= 0:
        return UNKNOWN_RETRY_S
    seconds = min(max(num_waiting, 1) / finished_per_s, MAX_RETRY_S)
    return max(math.ceil(seconds), MIN_RETRY_S)
