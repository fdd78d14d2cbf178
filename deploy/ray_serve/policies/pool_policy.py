"""How many servers a pool should have; runs in Ray Serve's controller, and imports little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

# What a server tells the autoscaler.
OPEN_REQUESTS, BUSY, WAITING = "open_requests", "busy", "waiting"


class PoolState(Protocol):
    """Of Ray Serve's `AutoscalingContext` what the policy reads: means of each running server."""

    target_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """Metric -> server -> its mean over the period that is looked back on."""
        ...


class PoolPolicy:
    """As many servers as take the open requests, and the work, at their targets.

    Both are totals, which stay what they are where servers come and go: a number of servers that
    was right is still right after it was reached. Ray Serve adds bounds and delays.

    target_open_requests  of one server
    target_utilization    share of the time that one server should work
    """

    def __init__(self, target_open_requests: float, target_utilization: float) -> None:
        self._target_open_requests = target_open_requests
        self._target_utilization = target_utilization

    def __call__(self, state: PoolState) -> tuple[float, dict[str, Any]]:
        """The number of servers, not rounded, and nothing to remember."""
        metrics = state.aggregated_metrics or {}
        if not metrics.get(OPEN_REQUESTS):
            # No server has told yet.
            return state.target_num_replicas, {}
        # A message that waits would be worked on, were there another server.
        work = _total(metrics, BUSY) + _total(metrics, WAITING)
        num_open = _total(metrics, OPEN_REQUESTS)
        return max(num_open / self._target_open_requests, work / self._target_utilization), {}


def _total(metrics: Mapping[str, Mapping[Any, float]], name: str) -> float:
    return sum(metrics.get(name, {}).values())
