"""What a plan of tiles promises: every row meets every column once, within the room there is."""

from __future__ import annotations

import numpy as np
from draftline.kernels.attention.tile_plan import (
    COLUMN_STEP,
    RequestRows,
    lines_of_tiles,
    plan_tiles,
)
from hypothesis import given
from hypothesis import strategies as st


@st.composite
def request_rows(draw: st.DrawFn) -> RequestRows:
    lens = draw(
        st.lists(
            st.tuples(st.integers(0, 90), st.integers(0, 9000), st.integers(0, 20), st.booleans()),
            min_size=1, max_size=6,
        )
    )  # fmt: skip
    num_rows = np.array([rows for rows, *_ in lens])
    is_causal = np.array([causal for *_, causal in lens])
    num_own = num_rows + np.where(is_causal, 0, [more for _, _, more, _ in lens])
    fields = (
        np.cumsum(num_rows) - num_rows, num_rows, [context for _, context, *_ in lens],
        np.cumsum(num_own) - num_own, num_own, is_causal,
    )  # fmt: skip
    return RequestRows(np.stack(fields, axis=1).astype(np.int32))


@given(request_rows(), st.integers(1, 64), st.integers(1, 200), st.integers(0, 64))
def test_every_row_meets_every_column_once(
    requests: RequestRows, tile_rows: int, num_programs: int, max_partials: int
) -> None:
    total = int(requests.column(1).sum())
    plan = plan_tiles(
        requests, total, tile_rows, num_programs=num_programs, max_partials=max_partials
    )
    context_seen, own_seen = np.zeros(total, dtype=int), np.zeros(total, dtype=int)
    ends: dict[int, list[tuple[int, int]]] = {}
    for request, first, num_rows, begin, end, num_own, _ in plan.items.tolist():
        assert 1 <= num_rows <= tile_rows
        assert begin % COLUMN_STEP == 0
        rows = slice(first, first + num_rows)
        context_seen[rows] += end - begin
        own_seen[rows] += num_own
        ends.setdefault(first, []).append((begin, end))
        first_row, request_len, _, _, all_own, is_causal = requests.table[request].tolist()
        assert first_row <= first < first + num_rows <= first_row + request_len
        if num_own:
            assert num_own == (first + num_rows - first_row if is_causal else all_own)
    for spans in ends.values():
        spans.sort()
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
    np.testing.assert_array_equal(context_seen, np.repeat(requests.column(2), requests.column(1)))
    assert (own_seen > 0).all()


@given(request_rows(), st.integers(1, 64), st.integers(1, 200), st.integers(0, 64))
def test_partial_results_have_places_that_the_merge_finds(
    requests: RequestRows, tile_rows: int, num_programs: int, max_partials: int
) -> None:
    total = int(requests.column(1).sum())
    plan = plan_tiles(
        requests, total, tile_rows, num_programs=num_programs, max_partials=max_partials
    )
    partials = plan.items[plan.items[:, 6] >= 0]
    assert len(partials) <= max_partials
    assert sorted(partials[:, 6].tolist()) == list(range(len(partials)))
    found = {
        (row, place)
        for row, (first, count, _) in enumerate(plan.merges.tolist())
        for place in range(first, first + count)
    }
    expected = {
        (first + row, place)
        for _, first, num_rows, *_, place in partials.tolist()
        for row in range(num_rows)
    }
    assert found == expected
    for _, first, num_rows, *_ in plan.items.tolist():
        rows = plan.merges[first : first + num_rows]
        assert rows[:, 2].tolist() == list(range(num_rows))


def test_long_contexts_are_split_for_as_many_programs_as_are_asked_for() -> None:
    one = RequestRows(np.array([[0, 4, 64000, 0, 4, 0]], dtype=np.int32))
    plan = plan_tiles(one, 4, 16, num_programs=50, max_partials=128)
    assert 45 <= len(plan.items) <= 51
    beside_many = np.array(
        [[0, 1, 64000, 0, 1, 0]] + [[row, 1, 640, row, 1, 0] for row in range(1, 101)]
    )
    plan = plan_tiles(
        RequestRows(beside_many.astype(np.int32)), 101, 16, num_programs=50, max_partials=128
    )
    widths = plan.items[:, 4] - plan.items[:, 3]
    assert widths.max() < 4000
    assert (np.diff(widths + plan.items[:, 5]) <= 0).all()


def test_tiles_grow_with_requests_and_hold_a_whole_row() -> None:
    assert [lines_of_tiles(4, rows) for rows in (0, 1, 4, 5, 9, 4000)] == [16, 16, 16, 32, 64, 64]
    assert lines_of_tiles(71, 1) == 128
