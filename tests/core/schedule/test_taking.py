"""Which set of drafters is taken for a request, of what each is known to bring."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.core.proposals import DraftCost
from draftline.core.reach import NUM_REACHES
from draftline.core.schedule.choice.deciding import decide, will_ask
from draftline.core.schedule.choice.drafter_choice import DrafterChoice
from draftline.core.schedule.choice.kernels import ASKED, BEYOND, GAIN, TRIED, WEIGHT
from draftline.core.schedule.choice.known import cell_of
from draftline.core.schedule.choice.taking import Expected, worth_asking
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
    sliced_ms  as `Expected.sliced`
    """
    names = tuple(gains)
    choice = DrafterChoice()
    choice.use(names)
    wish = DraftWish("one", 0.0, "shared", None, 9, 9)
    wishes = choice._wanted([wish], dict.fromkeys(names, DraftCost()), ROUND_MS, ROUND_MS)
    wishes = wishes._replace(is_ahead=np.array([name in ahead for name in names]))
    brought = np.zeros((1, len(names), 1 + len(names), 3))
    for place, name in enumerate(names):
        brought[0, place, BEYOND:, GAIN] = [gains[name][other] for other in names]
    own_ms = np.array([[costs_ms[name] for name in names]])
    expected = Expected(brought, own_ms, np.array([sliced_ms]))
    choices = worth_asking(expected, choice._known, wishes)[0]
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


def test_slices_of_a_reach_count_against_orders_behind_steps_of_that_reach() -> None:
    """Of a streamed request; one in rounds gives nothing up."""
    choice = DrafterChoice()
    choice.use(["head"])
    costs = {"head": DraftCost(0.0, 3.0, 0.0, is_ahead=True)}
    known = choice._known
    known.levels[0, 0, BEYOND, :, WEIGHT] = known.levels[0, 0, BEYOND, :, GAIN] = 1000.0
    sliced = np.zeros((NUM_REACHES, 2))
    sliced[2] = 20.0, 4.0
    for is_streamed, asked in ((False, [1, 1, 1]), (True, [1, 1, 0])):
        wish = DraftWish("one", 0.0, "shared", None, 9, 9, 0, is_streamed)
        wishes = choice._wanted([wish], costs, ROUND_MS, ROUND_MS)._replace(sliced=sliced)
        found = [
            will_ask(known, wishes, np.array([cell_of(0, reach)]))[0, 0]
            for reach in range(NUM_REACHES)
        ]
        assert found == asked


def test_a_trial_that_ends_slices_pays_for_them_and_leaves_no_debt() -> None:
    for seconds, tokens, left in ((0.0, 0.0, 5.0), (20.0, 2.2, 4.0), (20.0, 9.0, 0.0)):
        choice = DrafterChoice()
        choice.use(["head"])
        costs = {"head": DraftCost(0.0, 3.0, 0.0, is_ahead=True)}
        choice._known.balance[0, 0], choice._known.host[0] = 5.0, 5.0
        wish = DraftWish("one", 0.0, "shared", None, 9, 9, 0, seconds > 0)
        wishes = choice._wanted([wish], costs, ROUND_MS, ROUND_MS)
        sliced = np.full((NUM_REACHES, 2), (seconds, tokens))
        choices = decide(choice._known, wishes._replace(sliced=sliced, most_s=4.5))[0]
        assert choices[0, 0] == ASKED + TRIED
        assert choice._known.balance[0, 0] == pytest.approx(left)


def test_runs_of_slices_are_known_by_the_reach_before_them() -> None:
    runs = SlicedRuns()
    assert not runs.means.any()
    for _ in range(200):
        runs.note(SlicedRun(began_at=5.0, num_tokens=10, reach=2), 18, 7.0)
    assert runs.means[2] == pytest.approx([2.0, 8.0])
    assert not runs.means[:2].any()
    # Late ones count more.
    for _ in range(100):
        runs.note(SlicedRun(began_at=5.0, num_tokens=10, reach=2), 14, 6.0)
    seconds, tokens = runs.means[2]
    assert seconds == pytest.approx(1.0, abs=0.2)
    assert tokens == pytest.approx(4.0, abs=0.8)
