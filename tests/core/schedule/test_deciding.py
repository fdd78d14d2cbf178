"""What a step's rows and tokens are worth when drafters are chosen."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.core.proposals import DraftCost
from draftline.core.schedule.choice.kernels import (
    BEYOND,
    DECAYS,
    GAIN,
    PRIORS,
    WEIGHT,
    means_of_request,
)
from draftline.core.schedule.choice.known import nothing_known, padded
from draftline.core.schedule.choice.taking import row_seconds
from draftline.core.schedule.choice.wishes import DraftWish
from support.fakes.budget_simulation import Echo, Guess, Simulation


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
    found_s = row_seconds(wanted._replace(grid=grid, curve_s=curve_s), first, count)
    assert found_s == pytest.approx(taken_s / max(count, 1.0))


@pytest.mark.parametrize("num_steps", [0, 1, 8, 400])
def test_the_more_is_known_of_a_request_the_less_its_class_counts(num_steps: int) -> None:
    levels = padded(padded(nothing_known().levels, 1, 1), 2, 1)
    above = np.full((1, 2, 3), 9.0)
    own = levels[5, 0, BEYOND, 0]
    for _ in range(num_steps):
        own[WEIGHT] = DECAYS[2] * own[WEIGHT] + 1.0
        own[GAIN] = DECAYS[2] * own[GAIN] + 2.0
    prior = PRIORS[2] * DECAYS[2] ** num_steps
    expected = means_of_request(above, levels, 5, 0)[0, BEYOND, GAIN]
    assert expected == pytest.approx((2.0 * own[WEIGHT] + 9.0 * prior) / (own[WEIGHT] + prior))


class Unlike(Echo):
    """A cheap drafter knows eight tokens of the requests that copy, and one of the others; a dear
    one knows four of any. Nodes take next to nothing."""

    def __init__(self) -> None:
        cheap = Guess(lambda _one: 1.0, length=8)
        dear = Guess(lambda _one: 1.0, length=4, cost=DraftCost(0.0, 0.012, 0.0))
        super().__init__({"cheap": cheap, "dear": dear}, curve=([1, 101], [0.010, 0.011]))

    def num_known(self, drafter: str, request: str) -> int:
        if drafter == "cheap" and not request.startswith("copies"):
            return 1
        return super().num_known(drafter, request)

    def answer(self, name: str) -> None:
        """128 tokens of one request alone."""
        while self.decoded.get(name, 0) < 128:
            self.round([name])
        self.budget.forget(name)


def test_a_token_is_worth_what_tokens_take_the_request_itself() -> None:
    """Behind the cheap one the dear one turns two tokens of 10 ms into five of 22, which pays,
    though copying makes tokens of late so cheap that three of them take less than its 12 ms."""
    simulation = Unlike()
    for index in range(40):
        simulation.answer(f"copies{index}")
        simulation.answer(f"writes{index}")
    of_late = [f"writes{index}" for index in range(20, 40)]
    cheap, dear = (
        sum(simulation.num_asked.get((name, one), 0) for one in of_late)
        for name in ("cheap", "dear")
    )
    # Behind a step that it made long a request is taken for one that copies.
    assert dear > 0.45 * cheap
    copying = [f"copies{index}" for index in range(20, 40)]
    assert sum(simulation.num_asked.get(("dear", one), 0) for one in copying) < 0.1 * dear
