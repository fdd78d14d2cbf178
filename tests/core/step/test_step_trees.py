"""The trees of a step, kept as arrays, are the `TreeRows` that they were made one by one."""

from __future__ import annotations

import numpy as np
from draftline.cluster.transport.step_codec.encoder import flatten_trees
from draftline.core.arrays import Int32
from draftline.core.proposals import chain_proposal
from draftline.core.steps import StepTrees, TreeRows
from draftline.core.tree.merge import merge_all
from draftline.core.tree.tree import TreeBatch
from draftline.core.tree.tree_loops import visible_columns
from hypothesis import given
from hypothesis import strategies as st
from support.inputs.engine_steps import engine_steps, two_ways

SIZES = st.lists(st.integers(0, 70), max_size=5)


def batch_of(sizes: list[int]) -> TreeBatch:
    """Two chains a tree."""
    requests = [
        [
            chain_proposal("a", np.arange(size // 2, dtype=np.int32)),
            chain_proposal("b", 1000 + np.arange(size - size // 2, dtype=np.int32)),
        ]
        for size in sizes
    ]
    return merge_all(requests, [99] * len(sizes), [99] * len(sizes))


def step_trees(batch: TreeBatch, num_chunks: int) -> StepTrees:
    """Rows of trees, then chunks of two rows."""
    sizes = np.r_[batch.sizes + 1, np.full(num_chunks, 2)]
    starts = np.r_[0, sizes.cumsum()].astype(np.int32)
    slots = np.random.default_rng(0).permutation(int(starts[-1])).astype(np.int32)
    positions = slots + np.int32(7)
    return StepTrees(batch.ancestors(), starts, slots, positions, len(batch))


def assert_same(found: TreeRows | None, expected: TreeRows | None) -> None:
    assert (found is None) == (expected is None)
    for one, other in zip(found or (), expected or (), strict=True):
        np.testing.assert_array_equal(one, other)


@given(SIZES, st.integers(0, 2))
def test_each_is_made_as_it_was(sizes: list[int], num_chunks: int) -> None:
    batch = batch_of(sizes)
    trees = step_trees(batch, num_chunks)
    assert len(trees) == len(sizes) + num_chunks
    for index, found in enumerate(trees):
        own = slice(trees.starts[index], trees.starts[index + 1])
        expected = None
        if index < len(batch):
            rows = trees.slots[own], trees.positions[own]
            expected = TreeRows(batch[index].ancestors(), *rows)
        assert_same(found, expected)
    assert list(trees[1:]) == list(trees)[1:]


async def test_messages_are_those_of_single_trees() -> None:
    steps = await engine_steps()
    assert any(step.trees[0] is not None and None in list(step.trees) for step in steps)
    for step in steps:
        arrays, single = map(flatten_trees, two_ways(step))
        assert (arrays is None) == (single is None)
        if arrays is not None and single is not None:
            np.testing.assert_array_equal(arrays.shapes, single.shapes)
            np.testing.assert_array_equal(arrays.ancestors, single.ancestors)
            assert arrays.columns is None
            assert single.columns is None


@given(SIZES)
def test_visible_columns_are_the_masks(sizes: list[int]) -> None:
    batch = batch_of(sizes)
    num_rows: Int32 = (batch.sizes + 1).astype(np.int32)
    masks = [np.empty(0, dtype=np.bool_), *(tree.mask().ravel() for tree in batch)]
    np.testing.assert_array_equal(visible_columns(batch.ancestors(), num_rows), np.r_[*masks])
