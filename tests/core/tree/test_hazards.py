"""Values in requests whose drafts fail more or less often than others."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.core.arrays import ROOT
from draftline.core.proposals import Proposal
from draftline.core.tree.acceptance import AcceptanceTable
from draftline.core.tree.hazards import MOST_SURE, values_under
from draftline.core.tree.merge import merge_all
from draftline.core.tree.tree import TreeBatch
from hypothesis import given
from hypothesis import strategies as st


def trees(*parents: list[int], seed: int = 0) -> TreeBatch:
    rng = np.random.default_rng(seed)
    table = AcceptanceTable()
    for rank in range(4):
        for depth in range(1, 6):
            for _ in range(20):
                table.record("a", 0.0, depth, rank, accepted=bool(rng.random() < 0.6 / (1 + rank)))
    proposals = [
        [
            Proposal(
                "a",
                np.arange(len(of_one), dtype=np.int32),
                np.array(of_one, dtype=np.int32),
                np.zeros(len(of_one), dtype=np.float32),
            )
        ]
        for of_one in parents
    ]
    return merge_all(proposals, [40] * len(parents), [40] * len(parents), table)


def under(batch: TreeBatch, *ratios: float) -> np.ndarray:
    return values_under(batch.nodes, batch.values, batch.node_ends, np.array(ratios))


def test_a_ratio_of_one_changes_nothing() -> None:
    batch = trees([ROOT, 0, 1], [ROOT, ROOT])
    assert np.array_equal(under(batch, 1.0, 1.0), batch.values)


def test_a_chain_survives_its_hazard_times_the_ratio() -> None:
    batch = trees([ROOT, 0, 1, 2])
    assert under(batch, 0.1) == pytest.approx(batch.values**0.1)
    assert under(batch, 3.0) == pytest.approx(batch.values**3)


def test_each_tree_has_its_own_ratio() -> None:
    batch = trees([ROOT, 0], [ROOT, 0])
    values = under(batch, 0.5, 1.0)
    assert values[:2] == pytest.approx(batch.values[:2] ** 0.5)
    assert np.array_equal(values[2:], batch.values[2:])


def test_siblings_of_a_surer_node_are_worth_less() -> None:
    batch = trees([ROOT, ROOT, ROOT])
    best = int(batch.values.argmax())
    values = under(batch, 0.2)
    assert values[best] > batch.values[best]
    others = np.arange(3) != best
    assert np.all(values[others] < batch.values[others])
    left, before = 1 - values[best], 1 - batch.values[best]
    assert values[others] == pytest.approx(batch.values[others] * left / before)


@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=20),
    st.floats(0.02, 10.0),
    st.integers(0, 20),
)
def test_no_node_is_worth_more_than_its_parent(draws: list[int], ratio: float, seed: int) -> None:
    parents = [draw % (node + 1) - 1 for node, draw in enumerate(draws)]
    batch = trees(parents, seed=seed)
    values = under(batch, ratio)
    above = np.where(batch.nodes[:, 1] == ROOT, 1.0, values[batch.nodes[:, 1]])
    assert np.all(values <= above)
    assert np.all(values > 0)
    assert MOST_SURE < 1
