"""What rows of a step take at the margin, by the curve of rounds."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.core.proposals import DraftCost
from draftline.core.schedule.choice.deciding import _row_seconds
from draftline.core.schedule.choice.wishes import DraftWish
from support.fakes.budget_simulation import Guess, Simulation


@pytest.mark.parametrize("first", [0.0, 0.5, 1.0, 3.0, 7.9, 8.0, 40.0])
@pytest.mark.parametrize("count", [0.0, 1.0, 2.5, 6.0, 100.0])
def test_rows_between_points_of_the_curve_take_what_lies_between(
    first: float, count: float
) -> None:
    grid, curve_s = np.array([0.5, 1.0, 2.0, 8.0, 16.0]), np.array([1.0, 1.5, 1.6, 4.0, 4.5])
    drafters = Simulation({"first": Guess(lambda _one: 0.0)}).budget._drafters
    drafters.use(["first"])
    wish = DraftWish("r0", 0.0, "shared", None, 9, 9)
    wanted = drafters._wanted([wish], {"first": DraftCost()}, token_s=1.0, plain_s=1.0)
    taken_s = np.diff(np.interp([first, first + max(count, 1.0)], grid, curve_s))[0]
    found_s = _row_seconds(wanted._replace(grid=grid, curve_s=curve_s), first, count)
    assert found_s == pytest.approx(taken_s / max(count, 1.0))
