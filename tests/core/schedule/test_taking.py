"""Which set of drafters is taken for a request, of what each is known to bring."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.core.proposals import DraftCost
from draftline.core.schedule.choice.drafter_choice import DrafterChoice
from draftline.core.schedule.choice.kernels import BEYOND, GAIN
from draftline.core.schedule.choice.taking import worth_asking
from draftline.core.schedule.choice.wishes import DraftWish
from draftline.core.schedule.sliced_runs import SlicedRuns
from draftline.core.tree.streamed_tree import SlicedRun

# Of plain decoding.
ROUND_MS = 10.0


def taken(
    gains: dict[str, dict[str, float]],
    costs_ms: dict[str, float],
    ahead: tuple[str, ...] = (),
    sliced_ms: tuple[float, float] = (0.0, 0.0),
) -> set[str]:
    """Who is asked for one request, whose rows take no time.

    gains      tokens that each brings beyond each other one, and beyond nobody in its own place
    ahead      who drafts at the end of a step
    sliced_ms  as `DraftWish.sliced`
    """
    names = tuple(gains)
    choice = DrafterChoice()
    choice.use(names)
    wish = DraftWish("one", 0.0, "shared", None, 9, 9, 0, sliced_ms[0] > 0, sliced_ms)
    costs = dict.fromkeys(names, DraftCost())
    wishes = choice._wanted([wish], costs, ROUND_MS, ROUND_MS)
    wishes = wishes._replace(is_ahead=np.array([name in ahead for name in names]))
    expected = np.zeros((1, len(names), 1 + len(names), 3))
    for place, name in enumerate(names):
        expected[0, place, BEYOND:, GAIN] = [gains[name][other] for other in names]
    own_ms = np.array([[costs_ms[name] for name in names]])
    choices = worth_asking(expected, own_ms, choice._known, wishes)[0]
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


@pytest.mark.parametrize(
    ("seconds", "tokens", "is_asked"),
    [
        (0.0, 0.0, True),
        # In a run of two rounds four tokens of 10 ms: it saves 10 ms of each.
        (20.0, 4.0, False),
        # No more than rounds bring.
        (40.0, 4.0, True),
        # 4 ms a round, where the head saves 5.
        (20.0, 2.8, True),
        (20.0, 3.2, False),
    ],
)
def test_slices_count_against_a_head_that_ends_them(
    seconds: float, tokens: float, *, is_asked: bool
) -> None:
    gains, costs = {"head": {"head": 1.0}}, {"head": 3.0}
    assert (taken(gains, costs, ("head",), (seconds, tokens)) == {"head"}) is is_asked
    # Others go on behind slices.
    assert taken(gains, costs, (), (seconds, tokens)) == {"head"}


def test_slices_are_given_up_once_for_all_heads() -> None:
    gains = {"first": {"first": 3.0, "other": 2.0}, "other": {"first": 1.0, "other": 1.0}}
    assert taken(gains, {"first": 3.0, "other": 0.5}, ("first", "other"), (20.0, 4.0)) == {
        "first",
        "other",
    }
    alone = {"other": {"other": 1.0}}
    assert taken(alone, {"other": 0.5}, ("other",), (20.0, 4.0)) == set()


def test_runs_of_slices_are_known_by_the_reach_before_them() -> None:
    runs = SlicedRuns()
    assert runs.expected(0) == runs.expected(2) == (0.0, 0.0)
    for _ in range(200):
        runs.note(SlicedRun(began_at=5.0, num_tokens=10, reach=2), 18, 7.0)
    assert runs.expected(2) == pytest.approx((2.0, 8.0))
    assert runs.expected(0) == (0.0, 0.0)
    # Late ones count more.
    for _ in range(100):
        runs.note(SlicedRun(began_at=5.0, num_tokens=10, reach=2), 14, 6.0)
    seconds, tokens = runs.expected(2)
    assert seconds == pytest.approx(1.0, abs=0.2)
    assert tokens == pytest.approx(4.0, abs=0.8)
