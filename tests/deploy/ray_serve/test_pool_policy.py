"""How many servers a pool gets for its open requests and its work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from draftline.deploy.ray_serve.autoscaling import BUSY, OPEN_REQUESTS, WAITING, PoolPolicy
from hypothesis import given
from hypothesis import strategies as st

POLICY = PoolPolicy(target_open_requests=8, target_utilization=0.5)


@dataclass
class State:
    """What Ray Serve tells a policy."""

    aggregated_metrics: Mapping[str, Mapping[str, float]] | None
    target_num_replicas: int = 3


def servers(num_open: list[float], busy: list[float], waiting: list[float]) -> float:
    told = {OPEN_REQUESTS: num_open, BUSY: busy, WAITING: waiting}
    by_server = {name: dict(zip("abcdef", values)) for name, values in told.items()}  # noqa: B905
    number, state = POLICY(State(by_server))
    assert state == {}
    return number


@pytest.mark.parametrize(
    ("num_open", "busy", "waiting", "expected"),
    [
        ([0, 0], [0, 0], [0, 0], 0),
        ([20, 4], [0.1, 0.1], [0, 0], 3),
        ([1, 1], [0.5, 0.5], [0, 0], 2),
        ([1, 1], [1.0, 1.0], [0.5, 0], 5),
        ([40], [1.0], [3.0], 8),
    ],
)
def test_as_many_as_take_the_larger_of_both(
    num_open: list[float], busy: list[float], waiting: list[float], expected: float
) -> None:
    assert servers(num_open, busy, waiting) == pytest.approx(expected)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=5), st.floats(0, 1))
def test_where_servers_come_and_go_their_total_decides(num_open: list[float], busy: float) -> None:
    """So that what was decided once is decided again when the servers are there."""
    spread = [sum(num_open) / 6] * 6
    many = servers(spread, [busy / 6] * 6, [0.0] * 6)
    few = servers(num_open, [busy, *[0.0] * (len(num_open) - 1)], [0.0] * len(num_open))
    assert many == pytest.approx(few)


@pytest.mark.parametrize("told", [None, {}, {OPEN_REQUESTS: {}}])
def test_before_any_server_has_told_nothing_changes(
    told: Mapping[str, Mapping[str, float]] | None,
) -> None:
    assert POLICY(State(told)) == (3, {})
