"""Repeated failures: few log lines, and retries after growing delays."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath

from ...core.errors import DraftlineError

PERIOD_S = 30.0


class FailureLog:
    """One line an event in `period_s` seconds; those between are counted in the next.

    clock  seconds; only differences count
    """

    def __init__(
        self,
        logger: logging.Logger,
        subject: str,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._subject = subject
        self._period_s = period_s
        self._clock = clock
        # By event: when the next line may be written, and how many were left out.
        self._events: dict[str, tuple[float, int]] = {}

    def log(self, event: str, reason: str) -> None:
        """Say that it happened, or count it."""
        now = self._clock()
        next_at, num_left_out = self._events.get(event, (now, 0))
        if now < next_at:
            self._events[event] = (next_at, num_left_out + 1)
            return
        self._events[event] = (now + self._period_s, 0)
        repeats = f" left_out={num_left_out}" if num_left_out else ""
        self._logger.warning("%s event=%s%s %s", self._subject, event, repeats, reason)


def failure_reason(error: BaseException) -> str:
    """What failed and where, without the words of errors that are not draftline's own.

    Those may hold what a request said.
    """
    if isinstance(error, DraftlineError):
        return str(error)
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if innermost is None:
        return type(error).__name__
    code = innermost.tb_frame.f_code
    file = "/".join(PurePath(code.co_filename).parts[-2:])
    return f"{type(error).__name__} in {code.co_name} at {file}:{innermost.tb_lineno}"


@dataclass(slots=True)
class Silence:
    """Counts in a row what a server left unanswered.

    A connection is answered by a server that is well within milliseconds, whatever its drafter
    does; a message takes as long as the drafter, which a prompt may keep for seconds.
    """

    max_connects: int = 2
    max_messages: int = 5
    connects: int = 0
    messages: int = 0

    @property
    def is_dead(self) -> bool:
        """Whether nothing but a new process can be expected to answer."""
        return self.connects >= self.max_connects or self.messages >= self.max_messages

    def connected(self) -> None:
        """The server answered a connection."""
        self.connects = 0

    def end(self) -> None:
        """The drafter answered, or is another now."""
        self.connects = self.messages = 0


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
