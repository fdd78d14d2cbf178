"""The step that the CPU kernels compute (`kernels/cpu/source/step.cpp`).

Layers and decoding read it from thread-local state, which `attending` sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Bool, Int32, UInt8
from ...core.steps import StepInput, StepTrees, TreeRows
from ...core.tree.tree import unpack, visible_columns
from .step_attention import PagedKv

NONE = np.empty(0, dtype=np.int32)


@contextmanager
def attending(step: StepInput, kv: PagedKv, block_size: int) -> Iterator[None]:
    """A context in which this thread's CPU kernels compute `step`."""
    columns = columns_of(step)
    torch.ops.draftline.begin_step(
        kv.data,
        block_size,
        _tensor(step.slots),
        _tensor(step.positions),
        _tensor(step.request_starts),
        _tensor(step.context_lens),
        _tensor(step.block_tables),
        _tensor(columns.starts),
        _tensor(columns.slots),
        _tensor(columns.positions),
        torch.from_numpy(columns.visible),
    )
    try:
        yield
    finally:
        torch.ops.draftline.end_step()


def advance(slots: Int32, positions: Int32) -> None:
    """Within `attending`, advance a step with one row a request to the next rows, int32 [requests].

    The previous rows become context, and their KV is written.
    """
    torch.ops.draftline.advance_step(_tensor(slots), _tensor(positions))


class VisibleColumns(NamedTuple):
    """The columns that rows of a step's trees see besides the context.

    starts            int32 [requests + 1] start of each request's columns
    slots, positions  int32 [columns]
    visible           uint8  of each request rows * columns: whether the row sees the column
    """

    starts: Int32
    slots: Int32
    positions: Int32
    visible: UInt8


def columns_of(step: StepInput) -> VisibleColumns:
    """The columns that rows of the step's trees see; none for prompt chunks."""
    return _own_columns(step.trees) if isinstance(step.trees, StepTrees) else _columns(step)


def _own_columns(trees: StepTrees) -> VisibleColumns:
    """For columns that are the rows of the step's first requests."""
    starts = trees.starts.copy()
    num_columns = starts[trees.num_trees]
    starts[trees.num_trees :] = num_columns
    visible = visible_columns(trees.ancestors, np.diff(starts[: trees.num_trees + 1]))
    return VisibleColumns(starts, trees.slots[:num_columns], trees.positions[:num_columns], visible)


def _columns(step: StepInput) -> VisibleColumns:
    trees = [tree for tree in step.trees if tree is not None]
    lens = [0 if tree is None else len(tree.slots) for tree in step.trees]
    return VisibleColumns(
        np.cumsum([0, *lens], dtype=np.int32),
        np.concatenate([NONE, *(tree.slots for tree in trees)]),
        np.concatenate([NONE, *(tree.positions for tree in trees)]),
        np.concatenate([NONE, *map(_visible, trees)], dtype=np.uint8, casting="unsafe"),
    )


def _visible(tree: TreeRows) -> Bool:
    return unpack(tree.ancestors, len(tree.slots)).ravel()


def _tensor(array: np.ndarray) -> Tensor:
    # torch warns about read-only arrays, such as those received in messages.
    if array.dtype != np.int32 or not array.flags.carray:
        array = np.array(array, dtype=np.int32)
    return torch.from_numpy(array)
