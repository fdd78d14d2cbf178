"""How often pipelined trees are left at a leaf."""

from __future__ import annotations

from draftline.core.pipelined.pace import Misses


def test_heads_do_not_draft_behind_leaves_where_runs_go_on() -> None:
    misses = Misses()
    assert misses.at_leaves
    for _ in range(300):
        misses.note([True, False, False])
    assert not misses.at_leaves


def test_heads_draft_behind_leaves_where_most_runs_end_there() -> None:
    misses = Misses()
    for _ in range(300):
        misses.note([True, True, False])
        misses.note([True])
        misses.note([True])
    assert misses.at_leaves
    # Late ones count more.
    for _ in range(40):
        misses.note([True, False])
    assert not misses.at_leaves
