"""The trees of a step as flat arrays, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Int32, Int64
from ..steps import StepInput, TreeRows
from .step_difference import RowsDifference, TreeArrays
from .typed_array import ends_of, expect, expect_flat, typed

NONE = np.empty(0, dtype=np.int32)
NO_TREE = -1


def flatten_trees(step: StepInput) -> TreeArrays | None:
    """The trees of a step, one behind the other; None without any.

    Raises `TypeError` for arrays that no tree has.
    """
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
    shapes = iter([own.shape for own in bits])
    dims = np.array(
        [(NO_TREE, 0) if tree is None else next(shapes) for tree in step.trees], dtype=np.int32
    )
    if _are_rows(step, num_columns, slots, positions):
        num_columns = slots = positions = NONE
    ancestors = np.concatenate([own.ravel() for own in bits])
    return TreeArrays(
        np.ascontiguousarray(dims[:, 0]), np.ascontiguousarray(dims[:, 1]), ancestors,
        num_columns, slots, positions,
    )  # fmt: skip


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
    expect_flat("trees", arrays.num_rows, arrays.num_words, arrays.ancestors)
    expect(len(arrays.num_rows) == len(arrays.num_words) == num_requests, "trees are of others")
    is_tree = arrays.num_rows != NO_TREE
    places = np.flatnonzero(is_tree)
    num_rows, num_words = arrays.num_rows[is_tree], arrays.num_words[is_tree]
    signs = num_rows.min(initial=0) >= 0 and num_words.min(initial=0) >= 0
    expect(signs, "trees have sizes below 0")
    sizes = num_rows.astype(np.int64) * num_words
    ends = sizes.cumsum().tolist()
    expect((ends[-1] if ends else 0) == len(arrays.ancestors), "trees are cut short")
    columns = _columns(rows, arrays, places)
    trees: list[TreeRows | None] = [None] * num_requests
    shapes = zip(num_rows.tolist(), num_words.tolist(), strict=True)
    parts = zip(places.tolist(), shapes, [0, *ends], ends, columns, strict=False)
    for place, shape, first, end, (slots, positions) in parts:
        trees[place] = TreeRows(arrays.ancestors[first:end].reshape(shape), slots, positions)
    return tuple(trees)


def _columns(
    rows: RowsDifference, arrays: TreeArrays, places: Int64
) -> Sequence[tuple[Int32, Int32]]:
    """Slots and positions of the columns of each tree."""
    slots, positions = arrays.slots, arrays.positions
    expect_flat("trees", arrays.num_columns, slots, positions)
    if len(arrays.num_columns):
        expect(len(arrays.num_columns) == len(places), "columns are of other trees")
        expect(len(slots) == len(positions), "columns have no position")
        ends = ends_of(arrays.num_columns, len(slots), "columns")
        firsts = [0, *ends]
    else:
        slots, positions = rows.slots, rows.positions
        firsts = rows.request_starts[places].tolist()
        ends = rows.request_starts[places + 1].tolist()
    pairs = zip(firsts, ends, strict=False)
    return [(slots[first:end], positions[first:end]) for first, end in pairs]
