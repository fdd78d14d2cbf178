"""Which set of drafters is taken for a request, of what each is known to bring."""

from __future__ import annotations

import numpy as np
from draftline.core.proposals import DraftCost
from draftline.core.reach import NUM_REACHES
from draftline.core.schedule.choice.deciding import will_ask
from draftline.core.schedule.choice.drafter_choice import DrafterChoice
from draftline.core.schedule.choice.kernels import BEYOND, GAIN, WEIGHT
from draftline.core.schedule.choice.known import cell_of
from draftline.core.schedule.choice.taking import Expected, worth_asking
from draftline.core.schedule.choice.wishes import EVERY_ANSWER, DraftWish

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


def test_a_head_is_paid_for_drafts_in_vain_where_slices_go_on() -> None:
    """It saves 8 ms with 3 ms; behind one answer in four its drafts are of use."""
    choice = DrafterChoice()
    choice.use(["head", "other"])
    costs = {"head": DraftCost(0.0, 3.0, 0.0, is_ahead=True), "other": DraftCost(0.0, 3.0, 0.0)}
    known = choice._known
    known.levels[0, :, BEYOND:, :, WEIGHT] = known.levels[0, :, BEYOND:, :, GAIN] = 1000.0
    # All that each says counts beyond the other.
    shares = np.array([1.0, 0.75, 0.25])
    for own_shares, asked in ((EVERY_ANSWER, [1, 1, 1]), (shares, [1, 1, 0])):
        wish = DraftWish("one", 0.0, "shared", None, 9, 9, 0, own_shares)
        wishes = choice._wanted([wish], costs, ROUND_MS, ROUND_MS)
        found = [
            will_ask(known, wishes, np.array([cell_of(0, reach)]))[0]
            for reach in range(NUM_REACHES)
        ]
        assert [own[0] for own in found] == asked
        assert [own[1] for own in found] == [1, 1, 1]
