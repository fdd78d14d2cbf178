"""The time as a drafter would read it whose passes took as long as those of a profile."""

from __future__ import annotations

import time
from collections.abc import Callable


class DraftClock:
    """Gives `time.monotonic()`, and during a draft when it began and the passes since; what is
    really past, if that is more.

    So stopping rules and shapes follow the profile's times, and deadlines end what it would end.
    """

    def __init__(self, pass_s: float, num_passes: Callable[[], int]) -> None:
        """`pass_s`: seconds here of a pass; `num_passes`: of the drafter up to now."""
        self._pass_s = pass_s
        self._num_passes = num_passes
        self._began_at: float | None = None
        self._passes_before = 0

    def begin(self) -> None:
        """A draft begins."""
        self._began_at = time.monotonic()
        self._passes_before = self._num_passes()

    def end(self) -> None:
        """It is done; what is left of its time is waited for."""
        self._began_at = None

    def __call__(self) -> float:
        """Seconds."""
        now = time.monotonic()
        if self._began_at is None:
            return now
        passes = self._num_passes() - self._passes_before
        return max(now, self._began_at + passes * self._pass_s)
