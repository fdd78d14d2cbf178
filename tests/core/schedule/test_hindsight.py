"""Drafted trees are judged by the text that follows, whatever was bought of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from draftline.core.arrays import ROOT
from draftline.core.proposals import Proposal
from draftline.core.schedule.hindsight import FIRST_SLOTS, Hindsight
from draftline.core.tree.acceptance import AcceptanceTable
from draftline.core.tree.merge import merge_all
from draftline.core.tree.tree import TreeBatch, empty_trees
from draftline.core.verify.walk import Paths
from hypothesis import given
from hypothesis import strategies as st

NOTHING = empty_trees(1)


def proposal(source: str, tokens: Sequence[int], parents: Sequence[int]) -> Proposal:
    return Proposal(
        source,
        np.array(tokens, dtype=np.int32),
        np.array(parents, dtype=np.int32),
        np.zeros(len(tokens), dtype=np.float32),
    )


def chain(source: str, tokens: Sequence[int]) -> Proposal:
    return proposal(source, tokens, range(ROOT, len(tokens) - 1))


def said(tokens: Sequence[Sequence[int]]) -> Paths:
    """What was committed to several requests; nobody asks of which rows and sources."""
    return Paths.of([[(0, token, -1) for token in own] for own in tokens])


class Judged:
    """One request, `Hindsight` and the table that it teaches."""

    def __init__(self) -> None:
        self.table = AcceptanceTable()
        self.hindsight = Hindsight()

    def drafted(self, *proposals: Proposal) -> TreeBatch:
        return merge_all([proposals], [40], [40], self.table)

    def say(self, drafted: TreeBatch, *tokens: int, ratio: float = 1.0) -> list[float]:
        """Failures and hazard of these tokens."""
        ratios = np.array([ratio])
        found = self.hindsight.judge(["a"], drafted, said([tokens]), self.table.counts, ratios)
        return found[0].tolist()

    def counted(self, source: str) -> tuple[float, float]:
        """Accepted and judged nodes of a drafter."""
        accepted, judged, _ = self.table.counts[self.table.source_id(source), -1]
        return float(accepted), float(judged)


def test_only_children_of_what_the_target_said_are_judged() -> None:
    judged = Judged()
    tree = judged.drafted(proposal("a", [1, 2, 3, 4], [ROOT, ROOT, 0, 1]))
    judged.say(tree, 1, 9)
    assert judged.table.estimate("a", 0.0, 1, 0) > 0.4 > judged.table.estimate("a", 0.0, 1, 1)
    # Token 3 below the right 1 was wrong, token 4 below the wrong 2 tells nothing.
    assert judged.counted("a") == (1, 3)


def test_a_tree_is_followed_over_several_commits_until_the_text_leaves_it() -> None:
    judged = Judged()
    judged.say(judged.drafted(chain("a", [1, 2, 3, 4])), 1)
    assert judged.counted("a") == (1, 1)
    # Newer trees wait until this one is judged.
    judged.say(judged.drafted(chain("b", [2, 3])), 2)
    assert judged.counted("a") == (2, 2)
    assert judged.counted("b") == (0, 0)
    judged.say(NOTHING, 9)
    assert judged.counted("a") == (2, 3)
    judged.say(NOTHING, 4)
    assert judged.counted("a") == (2, 3)
    judged.say(judged.drafted(chain("b", [5])), 5)
    assert judged.counted("b") == (1, 1)


def test_every_drafter_of_a_node_is_judged_by_it() -> None:
    judged = Judged()
    judged.say(judged.drafted(chain("a", [1, 2]), chain("b", [1, 3])), 1, 3, 4)
    assert judged.counted("a") == (1, 2)
    assert judged.counted("b") == (2, 2)


def test_failures_and_the_hazard_that_was_gone_through() -> None:
    judged = Judged()
    drafted = judged.drafted(chain("a", [1, 2, 3]))
    assert drafted.values.tolist() == [0.5, 0.25, 0.125]
    each = math.log(2.0)
    for ratio in (1.0, 3.0):
        judged = Judged()
        judged.drafted(chain("a", [1]))
        failures, hazard = judged.say(drafted, 1, 9, ratio=ratio)
        assert failures == 1
        # Of the second edge, what is survived on average before a failure within it.
        points = np.linspace(0.0, each, 100_001)
        survived = np.average(points, weights=np.exp(-ratio * points))
        assert hazard == pytest.approx(each + survived, rel=1e-4)


def test_another_child_than_the_most_probable_one_counts_as_a_failure() -> None:
    judged = Judged()
    tree = judged.drafted(chain("a", [1, 2]), chain("b", [1]), chain("c", [7, 8]))
    failures, hazard = judged.say(tree, 7, 8)
    assert failures == 1
    assert hazard > 0
    assert judged.counted("c") == (2, 2)


def test_what_ends_is_forgotten_and_its_room_used_again() -> None:
    hindsight, table = Hindsight(), AcceptanceTable()
    for index in range(3 * FIRST_SLOTS):
        drafted = merge_all([[chain("a", range(1, 90))]], [99], [99], table)
        ratios = np.ones(1)
        hindsight.judge([f"r{index}"], drafted, said([[1]]), table.counts, ratios)
        hindsight.forget(f"r{index}")
        hindsight.forget("unknown")
    assert hindsight._pending.at.shape == (FIRST_SLOTS,)


def test_more_requests_than_there_was_room_for() -> None:
    count = 3 * FIRST_SLOTS
    hindsight, table = Hindsight(), AcceptanceTable()
    ids = [f"r{index}" for index in range(count)]
    drafted = merge_all([[chain("a", [1, 2, 3])]] * count, [9] * count, [9] * count, table)
    ratios = np.ones(count)
    hindsight.judge(ids, drafted, said([[1]] * count), table.counts.copy(), ratios)
    counts = np.zeros_like(table.counts)
    hindsight.judge(ids, empty_trees(count), said([[2, 3]] * count), counts, ratios)
    accepted, judged, _ = counts[0, -1]
    assert accepted == judged > 0


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=8))
def test_it_does_not_matter_how_the_text_is_cut_into_commits(commits: list[list[int]]) -> None:
    parts, whole = Judged(), Judged()
    tree = [chain("a", [0, 1, 2, 0, 1]), proposal("b", [1, 0, 2, 2], [ROOT, ROOT, 0, 1])]
    drafted = parts.drafted(*tree)
    found = [parts.say(drafted, *commits[0])]
    found += [parts.say(NOTHING, *tokens) for tokens in commits[1:]]
    at_once = whole.say(whole.drafted(*tree), *[token for tokens in commits for token in tokens])
    np.testing.assert_allclose(np.sum(found, axis=0), at_once)
    assert np.array_equal(parts.table.counts, whole.table.counts)
