"""What heads could bring at best: counted from trees, and the rules' best speeds."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.benchmarks.heads.headroom import Step, best_speed, counted, headroom
from draftline.core.request.output import StepTiming, VerifiedTree
from draftline.measure.simulate.cost_profile import read_cost_profile


def tree(sources: str, path: tuple[int, ...], value: float) -> VerifiedTree:
    """A chain of nodes by `s`, the suffix drafter, or `h`, the head."""
    count = len(sources)
    names = tuple({"s": "suffix", "h": "head"}[one] for one in sources)
    timing = StepTiming((), 0.0, 0.0, 0.0, 0.0, 0.0)
    parents = tuple(range(-1, count - 1))
    values = (value,) * count
    return VerifiedTree(0, tuple(range(count)), parents, names, values, path, 0, timing)


def test_what_a_step_brings_with_so_many_levels_of_a_head() -> None:
    trees = [tree("sshsh", (0, 1, 2, 3, 4), 0.9), tree("hh", (0,), 0.5), tree("s", (), 0.1)]
    steps = counted(trees, "head")
    # Its nodes stand at depths 3 and 5.
    assert steps[0].accepted == (2, 2, 2, 4, 4, 5, 5)
    assert steps[1].accepted == (0, 1, 1, 1, 1, 1, 1)
    assert [step.reach for step in steps] == [0, 2, 1]
    # 2.7 tokens, none, 0.1.
    assert [step.sureness for step in steps] == [5, 0, 0]


def test_a_rule_asks_where_the_mean_of_a_group_pays() -> None:
    accepted = np.array([[4, 4], [4, 5], [0, 3], [0, 1]])
    costs = np.array([0.0, 0.5])
    # Of steps 2 and 3 a draft brings 2 tokens in half a second.
    speed, asked = best_speed(accepted, np.array([0, 0, 1, 1]), 1.0, costs)
    assert (speed, asked) == (pytest.approx(16 / 5), 0.5)
    # Of all together 1.25 tokens, which pays less than steps do.
    assert best_speed(accepted, np.zeros(4, dtype=int), 1.0, costs) == (3.0, 0.0)
    # One that knows all leaves out what brings less than it takes.
    speed, asked = best_speed(accepted, np.arange(4), 1.0, costs)
    assert (speed, asked) == (pytest.approx(15 / 4.5), 0.25)


def test_what_brings_nothing_is_asked_by_no_rule() -> None:
    steps = [Step(0, 0, (1,) * 7), Step(1, 2, (3,) * 7)]
    found = headroom(read_cost_profile("8b-h100"), 0.0, "griffin", steps)
    assert (found.alone, found.asked) == (3.0, 0.0)
    assert found.by_reach == found.by_sureness == found.in_hindsight == 1.0
