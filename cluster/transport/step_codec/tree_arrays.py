"""The trees of a step as flat arrays, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ....core.arrays import Int32, Int64
from ....core.steps import StepInput, StepTrees, TreeRows
from .step_difference import RowsDifference, TreeArrays, TreeColumns
from .typed_array import ends_of, expect, expect_flat, typed

NO_TREE = (-1, 0)


def flatten_trees(step: StepInput) -> TreeArrays | None:
    """The trees of a step, one behind the other; None without any.

    Raises `TypeError` for arrays that no tree has.
    """
    if isinstance(step.trees, StepTrees):
        return _own_columns(step.trees)
    trees = [tree for tree in step.trees if tree is not None]
    if not trees:
        return None
    bits = [typed(tree.ancestors, np.uint64, 2, "ancestors") for tree in trees]
    slots = np.concatenate([typed(tree.slots, np.int32, 1, "slots") for tree in trees])
    positions = np.concatenate([typed(tree.positions, np.int32, 1, "positions") for tree in trees])
    sizes = [(len(tree.slots), len(tree.positions)) for tree in trees]
    if any(num_slots != num_positions for num_slots, num_positions in sizes):
        raise TypeError("a tree has columns without a slot or a position")
    num_columns = np.array([count for count, _ in sizes], dtype=np.int32)
    own = iter([tree.shape for tree in bits])
    shapes = [NO_TREE if tree is None else next(own) for tree in step.trees]
    are_rows = _are_rows(step, num_columns, slots, positions)
    return TreeArrays(
        np.array(shapes, dtype=np.int32),
        np.concatenate([tree.ravel() for tree in bits]),
        None if are_rows else TreeColumns(num_columns, slots, positions),
    )


def _own_columns(trees: StepTrees) -> TreeArrays | None:
    """Trees that are arrays already."""
    if not trees.num_trees:
        return None
    shapes = np.full((len(trees), 2), NO_TREE, dtype=np.int32)
    shapes[: trees.num_trees] = trees.shapes
    return TreeArrays(shapes, trees.ancestors, None)


def _are_rows(step: StepInput, num_columns: Int32, slots: Int32, positions: Int32) -> bool:
    """Whether the columns of all trees are their requests' rows, the first ones of the step."""
    starts = step.request_starts[: len(num_columns) + 1]
    is_first = all(tree is not None for tree in step.trees[: len(num_columns)])
    if not is_first or not np.array_equal(np.diff(starts), num_columns):
        return False
    own = slice(int(starts[0]), int(starts[-1]))
    return np.array_equal(step.slots[own], slots) and np.array_equal(step.positions[own], positions)


def split_trees(rows: RowsDifference) -> tuple[TreeRows | None, ...]:
    """The trees of a step whose rows were checked.

    Raises `ProtocolError` for what `flatten_trees` cannot have made.
    """
    num_requests, arrays = len(rows.context_lens), rows.trees
    if arrays is None:
        return (None,) * num_requests
    shapes = arrays.shapes
    expect_flat("trees", arrays.ancestors)
    expect(shapes.shape == (num_requests, 2), "trees are of other requests")
    places = np.flatnonzero(shapes[:, 0] != NO_TREE[0])
    sizes = [(rows, words) for rows, words in shapes.tolist() if rows != NO_TREE[0]]
    expect(all(rows >= 0 and words >= 0 for rows, words in sizes), "trees have sizes below 0")
    ends = list(accumulate(rows * words for rows, words in sizes))
    expect((ends[-1] if ends else 0) == len(arrays.ancestors), "trees are cut short")
    columns = _columns(rows, arrays, places)
    trees: list[TreeRows | None] = [None] * num_requests
    parts = zip(places.tolist(), sizes, [0, *ends], ends, columns, strict=False)
    for place, shape, first, end, (slots, positions) in parts:
        trees[place] = TreeRows(arrays.ancestors[first:end].reshape(shape), slots, positions)
    return tuple(trees)


def _columns(
    rows: RowsDifference, arrays: TreeArrays, places: Int64
) -> Sequence[tuple[Int32, Int32]]:
    """Slots and positions of the columns of each tree."""
    columns = arrays.columns
    if columns is None:
        slots, positions = rows.slots, rows.positions
        firsts = rows.request_starts[places].tolist()
        ends = rows.request_starts[places + 1].tolist()
    else:
        slots, positions = columns.slots, columns.positions
        expect_flat("trees", columns.counts, slots, positions)
        expect(len(columns.counts) == len(places), "columns are of other trees")
        expect(len(slots) == len(positions), "columns have no position")
        ends = ends_of(columns.counts, len(slots), "columns")
        firsts = [0, *ends]
    pairs = zip(firsts, ends, strict=False)
    return [(slots[first:end], positions[first:end]) for first, end in pairs]
