"""What rounds cost is learned from rounds; rows never seem to get cheaper by being more."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from draftline.core.speculation.step_cost import GRID, LineFit, StepCost
from hypothesis import given
from hypothesis import strategies as st


def test_a_line_is_found_and_a_single_point_has_the_prior_slope() -> None:
    fit = LineFit(0.9)
    fit.record(2.0, 5.0)
    assert fit.slope(3.0, 1.0) == 3.0
    for x in (1.0, 4.0, 2.0, 8.0) * 30:
        fit.record(x, 1.0 + 0.5 * x)
    assert fit.slope(3.0, 0.01) == pytest.approx(0.5, rel=0.02)
    assert fit.mean_y == pytest.approx(1.0 + 0.5 * fit.mean_x)


def test_a_falling_line_counts_as_a_flat_one() -> None:
    fit = LineFit(0.9)
    for x in (1.0, 2.0, 3.0) * 20:
        fit.record(x, 10.0 - x)
    assert fit.slope(1.0, 0.01) == 0.0


def test_the_measured_curve_is_interpolated_and_continued() -> None:
    cost = StepCost([1, 9], [1.0, 5.0])
    assert float(cost.seconds(1, 3)) == pytest.approx(2.0)
    assert float(cost.seconds(1, 12)) == pytest.approx(6.5, abs=0.5)
    assert float(cost.seconds(1, 1000)) > 400


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 9, 40]), st.integers(0, 200), st.floats(0.1, 9.0))),
)
def test_no_measurement_makes_more_rows_cheaper(
    rounds: list[tuple[int, int, float]],
) -> None:
    cost = StepCost([1, 8, 16], [1.0, 3.0, 2.5])
    for num_requests, more, seconds in rounds:
        cost.record(num_requests, num_requests + more, seconds)
    for num_requests in (1, 2, 9, 40):
        seconds = cost.seconds(num_requests, np.arange(1, 300)).tolist()
        assert all(a <= b + 1e-9 for a, b in pairwise(seconds))
        assert seconds[0] > 0


def test_rows_take_half_of_what_they_do_on_the_idle_pipeline_at_least() -> None:
    cost = StepCost([1, 64], [1.0, 64.0])
    for _ in range(200):
        for rows in GRID[:12]:
            cost.record(1, rows, 40.0)
    few, more = cost.seconds(1, [32, 64]).tolist()
    assert more - few == pytest.approx(16.0)
    cost.record(1, 32, 1e9)
    assert float(cost.seconds(1, 32)) < 1.1 * few


def test_a_slow_round_of_few_rows_does_not_make_others_free() -> None:
    cost = StepCost([1, 64], [0.01, 0.16])
    for rows in (41, 42, 38, 35, 34):
        cost.record(32, rows, cost.idle_seconds(rows))
    cost.record(32, 33, 3 * cost.idle_seconds(33))
    few, many = cost.seconds(32, [33, 500]).tolist()
    assert many - few > 0.4 * (cost.idle_seconds(500) - cost.idle_seconds(33))


def test_a_host_that_works_beside_the_pass_makes_all_rounds_longer() -> None:
    """Rounds of few rows were never seen, and yet they are not taken for as short as the pass."""
    cost = StepCost([1, 101], [1.0, 2.0])
    for _ in range(100):
        cost.record(4, 41, 2.8)
    assert float(cost.seconds(4, 41)) == pytest.approx(2.8, rel=0.05)
    assert 1.8 < float(cost.seconds(4, 4)) < 2.6


def test_requests_have_curves_of_their_own() -> None:
    """Eight requests of one row are not one request of eight."""
    cost = StepCost([1, 64], [1.0, 2.0])
    for _ in range(100):
        cost.record(1, 8, 1.1)
        cost.record(8, 8, 4.0)
    assert float(cost.seconds(1, 8)) == pytest.approx(1.1, rel=0.05)
    assert float(cost.seconds(8, 8)) == pytest.approx(4.0, rel=0.1)


def test_a_slow_round_of_a_new_number_of_requests_says_little() -> None:
    """A system that had to find memory: rows must not seem free beside what it took."""
    cost = StepCost([1, 64], [0.002, 0.128])
    for _ in range(50):
        cost.record(32, 32, 0.088)
    cost.record(30, 30, 3 * 0.084)
    assert cost.seconds(30, 30) < 1.15 * 0.084
    assert cost.seconds(30, 40) - cost.seconds(30, 30) > 0.9 * 10 * 0.002
    for _ in range(50):
        cost.record(30, 30, 0.084)
    assert cost.seconds(30, 30) == pytest.approx(0.084, rel=0.02)


def test_more_requests_do_not_tell_what_rows_cost() -> None:
    """They bring contexts of their own, and rounds of late are longer than those before."""
    rng = np.random.default_rng(5)
    cost = StepCost([1, 64], [0.004, 0.075])
    for number in range(400):
        count = int(rng.integers(24, 33))
        longer = (
            1.2 + 0.1 * np.sin(number / 30) + 0.05 * (count - 28) + 0.02 * rng.standard_normal()
        )
        cost.record(count, count, cost.idle_seconds(count) * longer)
        plain, drafted = cost.seconds(32, [32, 40])
        idle_s = cost.idle_seconds(40) - cost.idle_seconds(32)
        assert drafted - plain == pytest.approx(idle_s, rel=0.05)
    assert plain == pytest.approx(1.4 * cost.idle_seconds(32), rel=0.15)
    # Rows that were computed do.
    for _ in range(40):
        cost.record(32, 48, plain + 2 * (cost.idle_seconds(48) - cost.idle_seconds(32)))
        cost.record(32, 32, plain)
    plain, drafted = cost.seconds(32, [32, 40])
    assert drafted - plain == pytest.approx(2 * idle_s, rel=0.2)
