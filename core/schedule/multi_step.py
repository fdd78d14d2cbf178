"""How many tokens a step decodes of each request while no drafts are verified.

A stage that holds the whole model can decode several tokens one behind the other. Where its pass is
short, that saves most of what plain decoding takes: planning, building and committing a step, and
the way to the stage and back.
"""

from __future__ import annotations

from collections.abc import Callable

from .step_cost import bucket_of

# Tokens of a request in a step, however short a pass is.
MOST_STEPS = 32
# Weight of the newest step in what a token of each request takes.
WEIGHT = 0.1


class MultiStep:
    """Follows what a token of each request takes where a step decodes several."""

    __slots__ = ("_is_possible", "_limit_s", "_seconds")

    def __init__(
        self, limit_s: float = 0.0, is_possible: Callable[[], bool] = lambda: True
    ) -> None:
        """`limit_s`: how long such a step may last, so that nobody waits for it; 0: a token a step.

        is_possible  whether the pipeline takes such steps now
        """
        self._limit_s = limit_s
        self._is_possible = is_possible
        self._seconds: dict[int, float] = {}

    def num_steps(self, num_requests: int, plain_s: float, most: int) -> int:
        """Tokens of each of so many requests in their next step, at most `most`.

        plain_s  what a round of one token each takes
        """
        seconds = min(self._seconds.get(bucket_of(num_requests), plain_s), plain_s)
        if not self._is_possible() or seconds * 2 > self._limit_s or most < 2:
            return 1
        return min(int(self._limit_s / seconds), MOST_STEPS, most)

    def round_s(self, num_requests: int, plain_s: float) -> float:
        """Seconds of plain decoding for a token of each request; `plain_s` as of `num_steps`."""
        if self.num_steps(num_requests, plain_s, MOST_STEPS) == 1:
            return plain_s
        return min(self._seconds.get(bucket_of(num_requests), plain_s), plain_s)

    def record(self, num_requests: int, num_passes: int, seconds: float) -> None:
        """Learn what a round with so many tokens of each request took."""
        bucket, each = bucket_of(num_requests), seconds / num_passes
        before = self._seconds.get(bucket, each)
        self._seconds[bucket] = before + WEIGHT * (each - before)
