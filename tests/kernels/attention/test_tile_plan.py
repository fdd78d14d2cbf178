"""What a plan of tiles promises: every row meets every column once, within the room there is."""

from __future__ import annotations

import numpy as np
from draftline.kernels.attention.tile_plan import (
    COLUMN_STEP,
    RequestRows,
    SplitRule,
    TilePlan,
    plan_tiles,
)
from hypothesis import given
from hypothesis import strategies as st

RULES = st.builds(SplitRule, st.sampled_from([1, 4, 7, 20, 71]), st.sampled_from([256, 600, 1024]))


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


@st.composite
def plans(draw: st.DrawFn) -> tuple[RequestRows, SplitRule, TilePlan]:
    """A step's requests, the rule, and the plan with tiles of a size that steps have."""
    requests, rule = draw(request_rows()), draw(RULES)
    tile_rows = rule.lines_of_tiles(draw(st.integers(1, 90))) // rule.share
    return requests, rule, plan_tiles(requests, tile_rows, rule)


@given(plans())
def test_every_row_meets_every_column_once(
    planned: tuple[RequestRows, SplitRule, TilePlan],
) -> None:
    requests, rule, plan = planned
    total = int(requests.column(1).sum())
    context_seen, own_seen = np.zeros(total, dtype=int), np.zeros(total, dtype=int)
    ends: dict[int, list[tuple[int, int]]] = {}
    for request, first, num_rows, begin, end, num_own, *_ in plan.items.tolist():
        assert num_rows >= 1
        assert num_rows * rule.share <= rule.tile_lines
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
    widths = plan.items[:, 4] - plan.items[:, 3] + plan.items[:, 5]
    assert (np.diff(widths // COLUMN_STEP) <= 0).all()


@given(plans())
def test_whoever_merges_finds_every_partial_result_of_its_tile_once(
    planned: tuple[RequestRows, SplitRule, TilePlan],
) -> None:
    """By what each item of a tile says: where the first result is, and how many there are."""
    requests, rule, plan = planned
    tiles: dict[tuple[int, int], list[tuple[int, int]]] = {}
    lines: list[int] = []
    for request, _, num_rows, begin, *_, partial, first_partial, count in plan.items.tolist():
        if count == 1:
            continue
        tiles.setdefault((first_partial, count), []).append((begin, partial))
        own = range(partial, partial + num_rows * rule.share)
        lines += own
        between = requests.table[request, 1] * rule.share
        assert (partial - first_partial) % between == 0
    for (first_partial, count), found in tiles.items():
        assert len(found) == count > 1
        partials = [partial for _, partial in sorted(found)]
        # As they are merged: in the order of the context.
        assert partials == sorted(partials)
        assert partials[0] == first_partial
    assert sorted(lines) == list(range(plan.num_lines))


@given(plans())
def test_any_mix_of_requests_fits(planned: tuple[RequestRows, SplitRule, TilePlan]) -> None:
    requests, rule, plan = planned
    assert len(plan.items) <= rule.most_items(int(requests.column(1).sum()), len(requests.table))
    assert plan.num_lines <= len(requests.table) * rule.split_lines


@given(request_rows(), RULES, st.sampled_from([1, 30]))
def test_a_request_is_split_alike_in_any_company(
    requests: RequestRows, rule: SplitRule, most_rows: int
) -> None:
    tile_rows = rule.tile_lines // rule.share
    among = plan_tiles(requests, tile_rows, rule)
    # Tiles of another size, as other steps may have, change no split.
    others = plan_tiles(requests, rule.lines_of_tiles(most_rows) // rule.share, rule)
    for index, (first, *_) in enumerate(requests.table.tolist()):
        alone = RequestRows(requests.table[index : index + 1].copy())
        alone.table[0, 0] = 0
        plan = plan_tiles(alone, tile_rows, rule)
        mine = among.items[among.items[:, 0] == index]
        mine[:, 1] -= first
        np.testing.assert_array_equal(cuts(mine), cuts(plan.items))
        assert {*mine[:, 8].tolist()} == {*plan.items[:, 8].tolist()}
        theirs = others.items[others.items[:, 0] == index]
        assert {*theirs[:, 3].tolist()} == {*mine[:, 3].tolist()}


def cuts(items: np.ndarray) -> np.ndarray:
    """Rows and columns of items, in one order."""
    fields = items[:, 1:6]
    return fields[np.lexsort(fields.T)]


def test_items_fit_where_every_request_is_split_as_far_as_can_be() -> None:
    rule = SplitRule(4, 1024)
    for num_rows in (1, 8, 16, 17, 40):
        table = np.array([[row * num_rows, num_rows, 64_000, 0, 1, 0] for row in range(20)])
        plan = plan_tiles(RequestRows(table.astype(np.int32)), 4, rule)
        assert len(plan.items) <= rule.most_items(20 * num_rows, 20)
        assert plan.num_lines <= 20 * rule.split_lines
        assert plan.items[:, 8].min() == min(32, 1024 // (num_rows * 4))
