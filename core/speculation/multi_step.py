"""How many tokens a step decodes of each request while no drafts are verified.

A stage that holds the whole model can decode several tokens one behind the other. Where its pass is
short, that saves most of what plain decoding takes: planning, building and committing a step, and
the way to the stage and back.
"""

from __future__ import annotations

from collections.abc import Callable

from .step_cost import LEAST_SHARE, StepCost, bucket_of

# Tokens of a request in a step, however short a pass is.
MOST_STEPS = 32
# Weight of the newest step in what a token of each request takes.
WEIGHT = 0.1
# Where steps have decoded several they may last so many times as long before they decode one again:
# what a token takes varies by chance, and near the limit that must not decide about each step.
STAY = 1.25


class MultiStep:
    """Follows what a token of each request takes where a step decodes several.

    Numbers of requests that have not decoded several yet take a pass of the idle pipeline, and for
    each request as much more as others took: where drafts always seem to pay beside rounds of one
    token, nothing else would ever tell what plain decoding takes.
    """

    __slots__ = ("_is_possible", "_limit_s", "_request_s", "_seconds", "_several")

    def __init__(
        self, limit_s: float = 0.0, is_possible: Callable[[], bool] = lambda: True
    ) -> None:
        """`limit_s`: how long such a step may last, so that nobody waits for it; 0: a token a step.

        is_possible  whether the pipeline takes such steps now
        """
        self._limit_s = limit_s
        self._is_possible = is_possible
        self._seconds: dict[int, float] = {}
        # Numbers of requests whose last plain step decoded several tokens.
        self._several: set[int] = set()
        # What a request adds to a pass of the idle pipeline.
        self._request_s = 0.0

    def num_steps(self, num_requests: int, cost: StepCost, most: int) -> int:
        """Tokens of each of so many requests in their next step, at most `most`."""
        if most < 2:
            return 1
        bucket = bucket_of(num_requests)
        seconds = self._each_s(num_requests, cost, _one_s(num_requests, cost))
        if not self._is_short(bucket, seconds):
            self._several.discard(bucket)
            return 1
        self._several.add(bucket)
        return min(max(int(self._limit_s / seconds), 2), MOST_STEPS, most)

    def round_s(self, num_requests: int, cost: StepCost) -> float:
        """Seconds of plain decoding for a token of each request."""
        one_s = _one_s(num_requests, cost)
        seconds = self._each_s(num_requests, cost, one_s)
        return seconds if self._is_short(bucket_of(num_requests), seconds) else one_s

    def record(self, num_requests: int, num_passes: int, seconds: float, cost: StepCost) -> float:
        """Learn what a round with so many tokens of each request took.

        Returns the seconds of one of them, as such rounds took of late.
        """
        bucket, each = bucket_of(num_requests), seconds / num_passes
        added = (each - cost.idle_seconds(num_requests)) / num_requests
        self._request_s = _follow(self._request_s if self._seconds else added, added)
        self._seconds[bucket] = _follow(self._seconds.get(bucket, each), each)
        return self._seconds[bucket]

    def _is_short(self, bucket: int, seconds: float) -> bool:
        """Whether a step may decode two tokens or more that take so long each."""
        limit_s = self._limit_s * (STAY if bucket in self._several else 1.0)
        return self._is_possible() and seconds * 2 <= limit_s

    def _each_s(self, num_requests: int, cost: StepCost, one_s: float) -> float:
        """No longer than a round of a single token each, `one_s`."""
        each = self._seconds.get(bucket_of(num_requests))
        if each is None:
            idle_s = cost.idle_seconds(num_requests)
            each = max(idle_s + num_requests * self._request_s, LEAST_SHARE * idle_s)
        return min(each, one_s)


def _one_s(num_requests: int, cost: StepCost) -> float:
    return float(cost.seconds(num_requests, num_requests))


def _follow(before: float, newest: float) -> float:
    return before + WEIGHT * (newest - before)
