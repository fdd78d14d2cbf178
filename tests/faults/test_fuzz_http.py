"""Made-up requests and raw garbage: no crash, no leak, and no other stream's text changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.fuzz.http_run import fuzz

CASES = 60
ALL_CASES = 2000
# Of the cases, at least so many are answered by text, or the fuzzing does not get past the checks.
LEAST_ANSWERED = 0.2


@pytest.mark.net
@pytest.mark.parametrize(
    "num_cases",
    [
        CASES,
        pytest.param(ALL_CASES, marks=[pytest.mark.full, pytest.mark.timeout(900)]),
    ],
)
def test_no_request_hurts_another(
    num_cases: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    report = fuzz(num_cases, tmp_path)
    record_property("health_max_s", report.health_max_s)
    print(f"slowest /health: {report.health_max_s} s; {report.statuses}")  # noqa: T201

    assert not report.faults, "\n".join(report.faults)
    assert report.cases == num_cases
    assert report.statuses[200] > LEAST_ANSWERED * num_cases
    assert report.steady_streams > 0
    assert report.after.accepted_tokens > report.before.accepted_tokens
    assert report.health_polls > 0
