"""Bootstrap intervals of tau."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from draftline.measure.records import SpecCounts, run_metrics
from draftline.measure.report.summary import Interval, tau_rows
from draftline.measure.runs.matched import Run
from support.fakes.fake_endpoint import ANSWER, record

RNG = np.random.default_rng(1)


def run_of(counts: list[tuple[int, int]] | None) -> list[Run]:
    """A run whose prompts committed so many tokens in so many steps."""
    plain = record(ANSWER, drafted=False)
    if counts is None:
        records = [replace(plain, counts=None)] * 2
    else:
        records = [
            replace(
                plain,
                counts=SpecCounts(
                    num_steps=steps, committed=tokens, drafted={}, accepted={}, lengths=()
                ),
            )
            for tokens, steps in counts
        ]
    return [Run(tuple(records), run_metrics(records, 1.0))]


def test_tau_is_of_all_tokens_and_steps_together() -> None:
    row, other = tau_rows({"a": run_of([(30, 10), (10, 10)]), "b": run_of([(9, 3)] * 2)}, ["", ""])
    assert row.tau.value == 2.0
    assert row.difference is None
    assert row.by_category == {}
    assert other.tau == Interval(3.0, 3.0, 3.0)
    assert other.difference is not None
    assert other.difference.value == 1.0


def test_what_makes_prompts_unlike_cancels_in_a_difference() -> None:
    """Prompts differ widely, and the second setting is a little better at each."""
    tokens = RNG.integers(10, 200, 40)
    runs = {
        "a": run_of([(int(count), 10) for count in tokens]),
        "b": run_of([(int(count) + 3, 10) for count in tokens]),
    }
    first, second = tau_rows(runs, [""] * 40)
    assert first.tau.high - first.tau.low > 2
    assert second.difference is not None
    assert second.difference.high - second.difference.low == pytest.approx(0, abs=1e-9)
    assert second.difference.verdict == "higher"


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    """Of 300 experiments with 40 prompts each: 95 % within three standard errors."""
    held = 0
    for _ in range(300):
        counts = [(int(count), 10) for count in RNG.integers(10, 50, 40)]
        (row,) = tau_rows({"a": run_of(counts)}, [""] * 40)
        held += row.tau.low <= 2.95 <= row.tau.high
    assert 0.95 - 3 * (0.95 * 0.05 / 300) ** 0.5 - 0.02 < held / 300 < 0.99


def test_categories_have_their_own() -> None:
    (row,) = tau_rows({"a": run_of([(30, 10), (10, 10), (10, 10)])}, ["qa", "qa", "math"])
    assert {name: one.value for name, one in row.by_category.items()} == {"qa": 2.0, "math": 1.0}


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(0.1, 1, "higher"), (-2, -1, "lower"), (-1, 1, "undecided")]
)
def test_verdicts(low: float, high: float, verdict: str) -> None:
    assert Interval((low + high) / 2, low, high).verdict == verdict


def test_servers_that_do_not_count_steps_have_no_row() -> None:
    assert tau_rows({"a": run_of(None)}, ["", ""]) == ()
