"""When a failed drafter is tried again: exponential delays with jitter."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The first `tolerated` failures in a row are retried at once; later ones after a delay that
    doubles from `first_delay_s` to `max_delay_s`, times a random factor from 0.5 to 1.
    """

    tolerated: int = 1
    first_delay_s: float = 0.1
    max_delay_s: float = 30.0


class CircuitBreaker:
    """Counts failures in a row of one drafter. Open: nothing may be sent before `retry_at`.

    Only an answer closes it again, so that a server that connects and then fails backs off too.
    """

    __slots__ = ("_failures", "_policy", "_random", "retry_at")

    def __init__(self, policy: RetryPolicy, rng: random.Random) -> None:
        self._policy = policy
        self._random = rng
        self._failures = 0
        self.retry_at = 0.0

    def fail(self, now: float) -> float:
        """Record a failure at `now` (s); the delay in s until the next try."""
        self._failures += 1
        doublings = self._failures - self._policy.tolerated - 1
        delay = 0.0
        if doublings >= 0:
            # 2 ** 60 is beyond every limit; larger powers overflow.
            longest = self._policy.first_delay_s * 2.0 ** min(doublings, 60)
            delay = min(longest, self._policy.max_delay_s) * self._random.uniform(0.5, 1.0)
        self.retry_at = now + delay
        return delay

    def succeed(self) -> None:
        """Record a good answer."""
        self._failures = 0

    @property
    def failures(self) -> int:
        """Failures since the last good answer."""
        return self._failures
