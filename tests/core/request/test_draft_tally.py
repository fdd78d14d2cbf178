"""Nodes that are counted for all requests at once are those that are counted one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np
from draftline.core.proposals import chain_proposal
from draftline.core.request.draft_tally import FIRST_ROWS, DraftTally
from draftline.core.tree.acceptance import AcceptanceTable
from draftline.core.tree.merge import merge_all
from draftline.core.tree.tree import TreeBatch, empty_trees
from hypothesis import given
from hypothesis import strategies as st

# Nodes of each drafter in a request's tree, and how many of the first are committed.
Drafted = tuple[list[int], int]
STEPS = st.lists(
    st.lists(st.tuples(st.lists(st.integers(0, 4), min_size=3, max_size=3), st.integers(0, 12)),
             min_size=2, max_size=2),
    max_size=4,
)  # fmt: skip


def trees_of(drafted: list[Drafted], table: AcceptanceTable) -> TreeBatch:
    """Chains of distinct tokens, so that each node is its own drafter's."""
    requests = [
        [
            chain_proposal(f"d{index}", 100 * index + np.arange(size, dtype=np.int32))
            for index, size in enumerate(sizes)
        ]
        for sizes, _ in drafted
    ]
    return merge_all(requests, [64] * len(drafted), [64] * len(drafted), table)


@given(STEPS)
def test_all_at_once_is_one_by_one(steps: list[list[Drafted]]) -> None:
    tally, table = DraftTally(), AcceptanceTable()
    nodes = [tally.open(), tally.open()]
    expected = [(Counter[str](), Counter[str]()) for _ in nodes]
    for drafted in steps:
        trees, sources, ends = trees_of(drafted, table), list[int](), list[int]()
        for (_, count), tree, (all_nodes, accepted) in zip(drafted, trees, expected, strict=True):
            taken = tree.sources[:count].tolist()
            sources += [*taken, -1]
            ends.append(len(sources))
            all_nodes.update(trees.names[source] for source in tree.sources.tolist())
            accepted.update(trees.names[source] for source in taken)
        rows = [one.row for one in nodes]
        tally.add(rows, trees, np.array(sources, dtype=np.int32), np.array(ends, dtype=np.int64))
    assert [one.totals for one in nodes] == expected
    assert [one.totals.wasted for one in nodes] == [drafted - taken for drafted, taken in expected]


def one_node(tally: DraftTally, rows: list[int]) -> None:
    trees = trees_of([([1], 1)] * len(rows), AcceptanceTable())
    ends = np.arange(1, len(rows) + 1)
    tally.add(rows, trees, np.zeros(len(rows), dtype=np.int32), ends)


def test_what_stood_at_the_end_stays_and_the_row_serves_the_next() -> None:
    tally = DraftTally()
    first, other = tally.open(), tally.open()
    row = first.row
    one_node(tally, [first.row, other.row])
    first.close()
    # Its step was on the way.
    one_node(tally, [first.row])
    next_one = tally.open()
    assert next_one.row == row
    assert next_one.totals == (Counter(), Counter())
    one_node(tally, [next_one.row])
    assert first.totals == next_one.totals == other.totals == ({"d0": 1}, {"d0": 1})


def test_what_stands_behind_an_end_is_taken_back() -> None:
    tally = DraftTally()
    nodes = tally.open()
    one_node(tally, [nodes.row])
    nodes.take_back(["d0"])
    assert nodes.totals == (Counter({"d0": 1}), Counter())
    assert nodes.totals.wasted == Counter({"d0": 1})


def test_there_is_room_for_any_number_of_requests() -> None:
    tally = DraftTally()
    nodes = [tally.open() for _ in range(3 * FIRST_ROWS)]
    assert len({one.row for one in nodes} - {0}) == len(nodes)
    one_node(tally, [one.row for one in nodes])
    assert all(one.totals.accepted == {"d0": 1} for one in nodes)


def test_steps_without_trees_count_nothing() -> None:
    tally = DraftTally()
    nodes = tally.open()
    bonus = np.full(1, -1, dtype=np.int32)
    tally.add([nodes.row], empty_trees(1), bonus, np.ones(1, dtype=np.int64))
    assert nodes.totals == (Counter(), Counter())
