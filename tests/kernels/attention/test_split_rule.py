"""How far contexts are split: by the request alone, within the room of any mix of requests."""

from __future__ import annotations

import pytest
from draftline.kernels.attention.spec import AttentionShape
from draftline.kernels.attention.tile_plan import (
    COLUMN_STEP,
    LEAST_SPLIT_LINES,
    MOST_SPLIT_LINES,
    MOST_SPLITS,
    PARTIAL_BYTES,
    SplitRule,
    split_len,
)
from hypothesis import given
from hypothesis import strategies as st


@given(
    st.integers(0, 200_000), st.integers(0, 5000),
    st.integers(LEAST_SPLIT_LINES, MOST_SPLIT_LINES), st.sampled_from([64, 128]),
    st.integers(1, 300),
)  # fmt: skip
def test_splits_are_whole_tiles_of_columns_and_few(
    context: int, lines: int, split_lines: int, tile_lines: int, programs: int
) -> None:
    length = split_len(context, lines, split_lines, tile_lines, programs)
    assert length % COLUMN_STEP == 0
    assert length > 0
    num_splits = max(-(-context // length), 1)
    assert num_splits <= MOST_SPLITS
    assert num_splits == 1 or num_splits * lines <= split_lines
    assert num_splits == 1 or num_splits * -(-lines // tile_lines) <= programs


def test_requests_of_one_tile_are_split_sooner() -> None:
    rule = SplitRule(4, 1024)
    numbers = rule.split_lines, rule.tile_lines, rule.programs
    assert split_len(1024, 4, *numbers) == split_len(1024, 64, *numbers) == 128
    assert split_len(1024, 68, *numbers) == 256
    # All 32 splits, and as many as there is room for.
    assert split_len(64_000, 4, *numbers) == 2048
    assert split_len(64_000, 300, *numbers) == 21_376
    assert split_len(64_000, 1028, *numbers) == 64_000


def test_a_request_alone_has_no_more_items_than_run_at_once() -> None:
    """A token, and trees of 64 and 128 nodes with their root, of a Llama 3 at long contexts."""
    rule = SplitRule.of(AttentionShape(32, 8, 128), 16)
    numbers = rule.split_lines, rule.tile_lines, rule.programs
    lengths = [split_len(32_768, 4 * rows, *numbers) for rows in (1, 65, 129)]
    assert [-(-32_768 // length) for length in lengths] == [32, 6, 3]
    # One on each multiprocessor, where two would be short.
    lengths = [split_len(1024, 4 * rows, *numbers) for rows in (1, 65, 129)]
    assert [-(-1024 // length) for length in lengths] == [8, 3, 1]


@pytest.mark.parametrize(
    ("max_requests", "lines"), [(1, 2048), (64, 2048), (128, 1024), (256, 512), (1024, 256)]
)
def test_the_room_of_a_request_is_what_many_leave_it(max_requests: int, lines: int) -> None:
    shape = AttentionShape(32, 8, 128)
    assert SplitRule.of(shape, max_requests) == SplitRule(4, lines, programs=33)
    if lines > LEAST_SPLIT_LINES:
        assert max_requests * lines * 8 * 128 * 4 <= PARTIAL_BYTES


def test_tiles_grow_with_requests_and_hold_a_whole_row() -> None:
    rule = SplitRule(4, 256)
    assert [rule.lines_of_tiles(rows) for rows in (0, 1, 4, 5, 9, 4000)] == [16, 16, 16, 32, 64, 64]
    assert SplitRule(71, 256).lines_of_tiles(1) == SplitRule(71, 256).tile_lines == 128
    assert SplitRule(4, 256).tile_lines == SplitRule(1, 256).tile_lines == 64


def test_tiles_of_long_keys_are_small() -> None:
    """float32 numbers of heads of 256: no thread holds the results of 64 lines."""
    shape = AttentionShape(8, 2, 256)
    rule = SplitRule.of(shape, 1, itemsize=4)
    assert rule.tile_lines == rule.lines_of_tiles(4000) == 32
    assert SplitRule.of(shape, 1, itemsize=2).tile_lines == 64
