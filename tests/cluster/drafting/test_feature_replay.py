"""What of a text's states a drafter lacks, and when they are whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from draftline.cluster.drafting.backlog import DrafterBacklog
from draftline.cluster.drafting.feature_replay import FeatureReplay
from draftline.core.proposals import FeatureRows
from hypothesis import given
from hypothesis import strategies as st


def rows(start: int, end: int) -> FeatureRows:
    """States whose only number is their position."""
    return FeatureRows("r", start, np.arange(start, end, dtype=np.float32)[:, None])


def check_whole(whole: FeatureRows | None, start: int, end: int) -> None:
    assert whole is not None
    assert (whole.request_id, whole.position) == ("r", start)
    assert whole.values[:, 0].tolist() == list(range(start, end))


def test_nothing_is_kept_while_nothing_is_missing() -> None:
    replay = FeatureReplay(100)
    for start, end in ((0, 40), (40, 43), (42, 45), (0, 45), (45, 47)):
        assert replay.note(rows(start, end)) is None
    assert replay.missing(47) is None


def test_what_a_prefix_hit_left_out_comes_in_pieces_between_steps() -> None:
    replay = FeatureReplay(100)
    assert replay.missing(20) == (0, 20)
    assert replay.note(rows(16, 20)) is None
    assert replay.missing(20) == (0, 16)
    assert replay.note(rows(20, 23)) is None
    assert replay.note(rows(0, 8)) is None
    assert replay.missing(23) == (8, 16)
    assert replay.note(rows(23, 24)) is None
    # The beginning of a block may be before what is missing, and the end behind it.
    check_whole(replay.note(rows(0, 18)), 0, 24)
    assert replay.missing(24) is None
    assert replay.note(rows(24, 26)) is None


def test_a_second_hole_is_filled_from_where_it_begins() -> None:
    replay = FeatureReplay(100)
    assert replay.note(rows(0, 10)) is None
    assert replay.note(rows(12, 14)) is None
    assert replay.missing(14) == (10, 12)
    check_whole(replay.note(rows(8, 12)), 10, 14)


def test_a_text_of_which_too_much_lacks_stays_as_it_is() -> None:
    replay = FeatureReplay(10)
    assert replay.missing(11) is None
    assert replay.missing(10) == (0, 10)
    assert replay.note(rows(9, 12)) is None
    assert replay.missing(12) is None
    # What follows is known from there on.
    assert replay.note(rows(12, 14)) is None
    assert replay.note(rows(15, 16)) is None
    assert replay.missing(16) == (14, 15)
    check_whole(replay.note(rows(14, 15)), 14, 16)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=30))
def test_in_whatever_order_they_come(parts: Sequence[tuple[int, int]]) -> None:
    """What is handed over is whole, from what was missing to the newest."""
    replay, seen = FeatureReplay(1000), set[int]()
    for start, count in parts:
        whole = replay.note(rows(start, start + count))
        seen.update(range(start, start + count))
        newest = max(seen) + 1
        missing = sorted(set(range(newest)) - seen)
        expected = replay.missing(newest)
        if missing:
            assert whole is None
            assert expected is not None
            assert expected[0] == missing[0]
            assert seen.isdisjoint(range(*expected))
        else:
            assert expected is None
        if whole is not None:
            check_whole(whole, whole.position, newest)


@pytest.mark.parametrize("replays", [True, False])
def test_a_drafter_is_handed_them_behind_what_it_was_handed_before(replays: bool) -> None:
    backlog = DrafterBacklog("head", 8, keeps_answers=False, replays=replays)
    backlog.note_features([rows(4, 6)])
    assert backlog.missing_features("r", 6) == ((0, 4) if replays else None)
    backlog.note_features([rows(6, 8), rows(0, 4)])
    handed = [(own.position, len(own.values)) for own in backlog.take_features(["r"])]
    assert handed == [(4, 2), (6, 2), (0, 4), *([(0, 8)] if replays else [])]
    # One that is started anew knows nothing.
    backlog.reset()
    assert backlog.missing_features("r", 8) == ((0, 8) if replays else None)
