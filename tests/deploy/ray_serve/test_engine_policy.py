"""How many replicas there should be, by requests and by times to their first tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from draftline.core.errors import ConfigError
from draftline.deploy.ray_serve.autoscaling import (
    NUM_FIRST_TOKENS,
    TTFT_S,
    WINDOW_S,
    EnginePolicy,
    FirstTokenTimes,
)
from draftline.deploy.ray_serve.deployment_plan import engine_options
from draftline.deploy.settings.settings import build_serve_args


@dataclass
class State:
    """What Ray Serve tells a policy."""

    current_num_replicas: int = 2
    total_num_requests: float = 0.0
    aggregated_metrics: dict[str, dict[str, float]] | None = field(default_factory=dict)


def told(*replicas: tuple[float, float]) -> dict[str, dict[str, float]]:
    """Mean time and count of each replica."""
    return {
        TTFT_S: {str(index): time for index, (time, _) in enumerate(replicas)},
        NUM_FIRST_TOKENS: {str(index): count for index, (_, count) in enumerate(replicas)},
    }


POLICY = EnginePolicy(target_ttft_s=2.0, target_ongoing_requests=4.0)


@pytest.mark.parametrize("metrics", [None, {}, told((0.0, 0.0)), told((0.5, 9.0))])
def test_where_first_tokens_come_in_time_requests_decide(
    metrics: dict[str, dict[str, float]] | None,
) -> None:
    assert POLICY(State(2, 4.0, metrics))[0] == 1.0
    assert POLICY(State(2, 20.0, metrics))[0] == 5.0


@pytest.mark.parametrize(("ttft_s", "expected"), [(1.5, 2.0), (2.0, 2.0), (3.0, 3.0), (9.0, 4.0)])
def test_late_first_tokens_add_replicas_at_most_twice_as_many(
    ttft_s: float, expected: float
) -> None:
    assert POLICY(State(2, 0.0, told((ttft_s, 1.0))))[0] == pytest.approx(expected)


def test_a_replica_with_more_requests_counts_more() -> None:
    assert POLICY(State(2, 0.0, told((6.0, 1.0), (2.0, 3.0))))[0] == pytest.approx(3.0)


def test_scaling_settles_where_the_time_falls_with_each_replica() -> None:
    """Of a load that four replicas answer in time."""
    count = 1
    seen = []
    for _ in range(12):
        count = math.ceil(POLICY(State(count, 8.0, told((8.0 / count, 5.0))))[0])
        seen.append(count)
    assert seen[:2] == [2, 4]
    assert set(seen[2:]) == {4}


def test_a_replica_tells_of_first_tokens_of_late_and_of_those_that_wait() -> None:
    now = 100.0
    tokens = FirstTokenTimes(lambda: now)
    assert tokens.stats() == {TTFT_S: 0.0, NUM_FIRST_TOKENS: 0.0}
    with tokens.waiting() as came:
        now += 2
        assert tokens.stats() == {TTFT_S: 2.0, NUM_FIRST_TOKENS: 1.0}
        came()
        now += 3
        came()
        with tokens.waiting():
            now += 4
            assert tokens.stats() == {TTFT_S: 3.0, NUM_FIRST_TOKENS: 2.0}
    # The second one left without a token.
    assert tokens.stats() == {TTFT_S: 2.0, NUM_FIRST_TOKENS: 1.0}
    now += WINDOW_S
    assert tokens.stats()[NUM_FIRST_TOKENS] == 0.0


def test_settings_choose_the_policy() -> None:
    scaling = {"max_replicas": 4, "target_ongoing_requests": 8}
    deployment = {"autoscaling_config": scaling, "target_ttft_s": 1.5}
    given = engine_options(build_serve_args({"deployment": deployment}))["autoscaling_config"]
    assert given["policy"]["policy_kwargs"] == {"target_ttft_s": 1.5, "target_ongoing_requests": 8}
    assert given["policy"]["policy_function"].endswith("autoscaling:EnginePolicy")
    plain = engine_options(build_serve_args({"deployment": {"autoscaling_config": scaling}}))
    assert plain["autoscaling_config"] == scaling


@pytest.mark.parametrize("scaling", [None, {"max_replicas": 2, "policy": {}}])
def test_a_target_needs_autoscaling_without_a_policy(scaling: dict[str, object] | None) -> None:
    with pytest.raises(ConfigError, match=r"deployment\.target_ttft_s"):
        build_serve_args({"deployment": {"autoscaling_config": scaling, "target_ttft_s": 1}})
