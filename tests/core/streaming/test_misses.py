"""How often streamed trees are left, by what their slices brought."""

from __future__ import annotations

import pytest
from draftline.core.streaming.misses import Misses


def test_of_answers_that_are_drafted_behind_those_that_end_a_run_are_counted() -> None:
    misses = Misses()
    assert misses.at_leaves
    assert misses.shares.tolist() == [1.0, 1.0, 1.0]
    for _ in range(300):
        # Two answers of reach 2, one of them at a leaf; the run ends with one of reach 0.
        misses.note([(2, True), (2, False), (0, False)])
    assert not misses.at_leaves
    # Nothing is drafted behind leaves; one is added to each count.
    assert misses.shares == pytest.approx([1.0, 1.0, 1 / 51], abs=0.001)


def test_heads_draft_behind_leaves_where_most_runs_end_there() -> None:
    misses = Misses()
    for _ in range(300):
        misses.note([(1, True), (1, True), (1, False)])
        misses.note([(1, True)])
        misses.note([(1, True)])
    assert misses.at_leaves
    # Of five answers three ended a run.
    assert misses.shares[1] == pytest.approx(0.6, abs=0.01)
    # Late ones count more.
    for _ in range(40):
        misses.note([(1, True), (0, False)])
    assert not misses.at_leaves
    assert misses.shares[0] == 1.0
