"""How many engine replicas and drafter servers there should be.

Runs in Ray Serve's controller, and imports little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

# Metrics of a replica for the autoscaler: seconds to first tokens, and of how many requests.
TTFT_S, NUM_FIRST_TOKENS = "ttft_s", "num_first_tokens"
# Ray Serve's own default.
TARGET_ONGOING_REQUESTS = 2.0
# Replicas may stop below this share of the target; between it and the target they stay.
IDLE_SHARE = 0.5
# A decision at most doubles the replicas, since new ones take effect later.
MAX_GROWTH = 2.0
# Period of the first tokens that a replica reports.
WINDOW_S = 10.0


class EnginePolicy:
    """As many replicas as the requests take, and more where first tokens come late.

    The time to a first token is no total that could be divided by a target, as requests are. It
    shows that there are too few replicas, and by about what factor. So replicas that were started
    for it stay until it is far below the target. Ray Serve adds bounds and delays.

    target_ttft_s            longest mean time to a first token, seconds
    target_ongoing_requests  of one replica
    """

    def __init__(
        self, target_ttft_s: float, target_ongoing_requests: float = TARGET_ONGOING_REQUESTS
    ) -> None:
        self._target_ttft_s = target_ttft_s
        self._target_ongoing_requests = target_ongoing_requests

    def __call__(self, state: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """The number of replicas, not rounded, and no state."""
        by_requests = state.total_num_requests / self._target_ongoing_requests
        late = _mean_ttft_s(state.aggregated_metrics or {}) / self._target_ttft_s
        if late <= IDLE_SHARE:
            return by_requests, {}
        growth = min(max(late, 1.0), MAX_GROWTH)
        return max(by_requests, state.current_num_replicas * growth), {}


def _mean_ttft_s(metrics: Mapping[str, Mapping[Any, float]]) -> float:
    """Over the requests of all replicas; 0 where there were none."""
    counts = metrics.get(NUM_FIRST_TOKENS, {})
    times = metrics.get(TTFT_S, {})
    total = sum(counts.values())
    weighted = sum(seconds * counts.get(replica, 0.0) for replica, seconds in times.items())
    return weighted / total if total else 0.0


class FirstTokenTimes:
    """Times to the first tokens of one replica's requests. One event loop uses it.

    clock  seconds; only differences count
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # (time of the token, seconds to it)
        self._came: deque[tuple[float, float]] = deque()
        self._waiting: dict[object, float] = {}

    @contextmanager
    def waiting(self) -> Iterator[Callable[[], None]]:
        """Context of a waiting request; the function that it yields is called at its tokens."""
        request = object()
        self._waiting[request] = self._clock()

        def came() -> None:
            began = self._waiting.pop(request, None)
            if began is not None:
                now = self._clock()
                self._came.append((now, now - began))

        try:
            yield came
        finally:
            self._waiting.pop(request, None)

    def stats(self) -> dict[str, float]:
        """Recent metrics for `EnginePolicy`. Waiting requests count with their time so far."""
        now = self._clock()
        while self._came and self._came[0][0] < now - WINDOW_S:
            self._came.popleft()
        times = [seconds for _, seconds in self._came]
        times += [now - began for began in self._waiting.values()]
        mean = sum(times) / len(times) if times else 0.0
        return {TTFT_S: mean, NUM_FIRST_TOKENS: float(len(times))}


# Metrics of a server for the autoscaler.
OPEN_REQUESTS, BUSY, WAITING = "open_requests", "busy", "waiting"


class PoolPolicy:
    """As many servers as take the open requests, and the work, at their targets.

    Both are totals, which do not change with the number of servers. So the number is stable once it
    is reached. Ray Serve adds bounds and delays.

    target_open_requests  of one server
    target_utilization    share of the time that one server should work
    """

    def __init__(self, target_open_requests: float, target_utilization: float) -> None:
        self._target_open_requests = target_open_requests
        self._target_utilization = target_utilization

    def __call__(self, state: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """The number of servers, not rounded, and no state."""
        metrics = state.aggregated_metrics or {}
        if not metrics.get(OPEN_REQUESTS):
            # No server has reported yet.
            return state.target_num_replicas, {}
        # A waiting message would be work of a further server.
        work = _total(metrics, BUSY) + _total(metrics, WAITING)
        num_open = _total(metrics, OPEN_REQUESTS)
        return max(num_open / self._target_open_requests, work / self._target_utilization), {}


def _total(metrics: Mapping[str, Mapping[Any, float]], name: str) -> float:
    return sum(metrics.get(name, {}).values())
