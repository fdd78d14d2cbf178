"""Which set of drafters is taken for a request, of what each is known to bring, and what a trial
is charged for."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.core.proposals import DraftCost
from draftline.core.schedule.choice.drafter_choice import DrafterChoice
from draftline.core.schedule.choice.kernels import ASKED, BEYOND, GAIN, TRIED
from draftline.core.schedule.choice.learning import charge_trials
from draftline.core.schedule.choice.taking import Expected, worth_asking
from draftline.core.schedule.choice.wishes import DraftWish

# Of plain decoding.
ROUND_MS = 10.0


def taken(
    gains: dict[str, dict[str, float]],
    costs_ms: dict[str, float],
) -> set[str]:
    """Who is asked for one request, whose rows take no time.

    gains  tokens that each brings beyond each other one, and beyond nobody in its own place
    """
    names = tuple(gains)
    choice = DrafterChoice()
    choice.use(names)
    wish = DraftWish("one", 0.0, "shared", None, 9, 9)
    wishes = choice._wanted([wish], dict.fromkeys(names, DraftCost()), ROUND_MS, ROUND_MS)
    brought = np.zeros((1, len(names), 1 + len(names), 3))
    for place, name in enumerate(names):
        brought[0, place, BEYOND:, GAIN] = [gains[name][other] for other in names]
    own_ms = np.array([[costs_ms[name] for name in names]])
    choices = worth_asking(Expected(brought, own_ms), choice._known, wishes)[0]
    return {name for name, choice in zip(names, choices[0], strict=True) if choice}


def test_a_dear_one_that_brings_more_is_not_kept_away_by_a_cheap_one() -> None:
    """Behind the cheap one, which saves most for what it takes, it would save too little."""
    gains = {"cheap": {"cheap": 0.5, "dear": 0.0}, "dear": {"cheap": 0.9, "dear": 2.0}}
    costs = {"cheap": 1.0, "dear": 6.0}
    assert taken(gains, costs) == {"dear"}
    # 1.4 tokens in 11 ms are more than 2.6 in 21.
    assert taken(gains, costs | {"dear": 11.0}) == {"cheap"}


def test_several_cheap_ones_that_say_together_what_a_dear_one_says_take_its_place() -> None:
    parts = [f"part{index}" for index in range(3)]
    gains = {one: dict.fromkeys(parts, 0.7) | {"dear": 0.0} for one in parts}
    gains["dear"] = dict.fromkeys(parts, 1.4) | {"dear": 2.1}
    costs = dict.fromkeys(parts, 0.1) | {"dear": 6.0}
    assert taken(gains, costs) == set(parts)


@pytest.mark.parametrize(("is_ahead", "taken"), [(True, 4.0), (False, 1.0)])
def test_a_trial_behind_slices_is_charged_for_drafts_in_vain(is_ahead: bool, taken: float) -> None:
    """Behind one answer in four its drafts are of use; one that is asked drafts just then."""
    choice = DrafterChoice()
    choice.use(["head"])
    costs = {"head": DraftCost(0.0, 1.0, 0.0, is_ahead=is_ahead)}
    wish = DraftWish("one", 0.0, "shared", None, 9, 9, 0, np.array([0.25, 1.0, 1.0]))
    wishes, known = choice._wanted([wish], costs, ROUND_MS, ROUND_MS), choice._known
    known.balance[:] = 10.0
    zero, tried = np.zeros((1, 1)), np.full((1, 1), ASKED + TRIED)
    sizes, heads = wishes.sizes, wishes.is_ahead
    charge_trials(known, wishes.rows, tried, zero, zero, sizes, heads, np.zeros(2), 99.0)
    assert known.balance[0, 0] == 10.0 - taken
