"""What heads could bring at best: counted from trees, and the rules' best speeds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest
from draftline.benchmarks.heads.headroom import Costs, best_speed, costs_of, headroom, walked
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


def answer(
    *positions: int, trees: Sequence[VerifiedTree]
) -> Callable[[int], Awaitable[VerifiedTree | None]]:
    """An answer that has these trees at these positions, and no others."""
    found = dict(zip(positions, trees, strict=True))

    async def tree_at(position: int) -> VerifiedTree | None:
        assert position in found or position > max(found)
        return found.get(position)

    return tree_at


async def test_what_a_step_brings_and_takes_with_so_many_levels_of_a_head() -> None:
    """Steps take a second, a node a tenth, a level half a second."""
    costs = Costs(1.0 + 0.1 * np.arange(9), 0.5 * np.arange(7))
    trees = [tree("sshsh", (0, 1, 2, 3, 4), 0.9), tree("hh", (0,), 0.5), tree("s", (), 0.1)]
    # Where the others alone come: two nodes and a token, then a token, then another.
    first, second, third = await walked(answer(0, 3, 4, trees=trees), "head", costs)
    # Its nodes stand at depths 3 and 5; what is behind them goes with them.
    assert first.tokens.tolist() == [3, 3, 3, 5, 5, 6, 6]
    nodes = np.array([2, 2, 2, 4, 4, 5, 5])
    assert first.seconds == pytest.approx(1 + 0.1 * nodes + 0.5 * np.arange(7))
    assert second.tokens.tolist() == [1, 2, 2, 2, 2, 2, 2]
    # A node that is right once in ten times is not worth its row.
    assert third.seconds[0] == 1.0
    assert [step.reach for step in (first, second, third)] == [0, 1, 0]
    # 1.8 tokens, none, none.
    assert [step.sureness for step in (first, second, third)] == [4, 0, 0]


def test_a_rule_asks_where_the_mean_of_a_group_pays() -> None:
    tokens = np.array([[5.0, 5.0], [5.0, 6.0], [1.0, 4.0], [1.0, 2.0]])
    seconds = np.tile([1.0, 1.5], (4, 1))
    # Of steps 2 and 3 a draft brings 2 tokens in half a second.
    speed, asked = best_speed(tokens, seconds, np.array([0, 0, 1, 1]))
    assert (speed, asked) == (pytest.approx(16 / 5), 0.5)
    # Of all together 1.25 tokens, which pays less than steps do.
    assert best_speed(tokens, seconds, np.zeros(4, dtype=int)) == (3.0, 0.0)
    # One that knows all leaves out what brings less than it takes.
    speed, asked = best_speed(tokens, seconds, np.arange(4))
    assert (speed, asked) == (pytest.approx(15 / 4.5), 0.25)


async def test_what_brings_nothing_is_asked_by_no_rule() -> None:
    costs = costs_of(read_cost_profile("8b-h100"), "griffin")
    assert costs.drafts_s[0] == 0.0
    assert (np.diff(costs.drafts_s) > 0).all()
    assert (np.diff(costs.steps_s) > 0).all()
    trees = [tree("ss", (0,), 0.9), tree("sh", (0,), 0.9)]
    steps = await walked(answer(0, 2, trees=trees), "head", costs)
    found = headroom("8B", 0.0, "griffin", steps)
    assert (found.alone, found.asked) == (2.0, 0.0)
    assert found.by_reach == found.by_sureness == found.in_hindsight == 1.0
