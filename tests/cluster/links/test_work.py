"""What a drafter server has to do, on a clock that the test moves."""

from __future__ import annotations

import pytest
from draftline.cluster.links.service import WorkMeter
from support.fakes.fake_link import FakeClock


def test_busy_is_a_share_and_waiting_a_mean() -> None:
    clock = FakeClock()
    meter = WorkMeter(clock)
    meter.enter()
    clock.now += 2.0
    meter.enter()
    meter.enter()
    clock.now += 1.0
    for _ in range(3):
        meter.leave()
    clock.now += 1.0
    assert meter.read() == pytest.approx((0.75, 0.5))
    clock.now += 5.0
    assert meter.read() == (0.0, 0.0), "what was read is not told again"
    assert meter.read() == (0.0, 0.0), "no time has gone by"


def test_what_is_not_done_yet_counts() -> None:
    clock = FakeClock()
    meter = WorkMeter(clock)
    clock.now += 1.0
    meter.enter()
    clock.now += 3.0
    assert meter.read() == pytest.approx((0.75, 0.0))
    clock.now += 3.0
    assert meter.read() == pytest.approx((1.0, 0.0))
