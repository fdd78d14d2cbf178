"""A step's attention as an operator that a compiled graph can call (`kernels/cpu/attention.cpp`).

The graph is the same for all steps, so the step is no argument of it: `attending` says which one
the thread computes now.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Bool
from ...core.steps import StepInput, TreeRows
from ...core.tree.kernels import unpack
from .step_attention import PagedKv


@contextmanager
def attending(step: StepInput, kv: PagedKv, block_size: int) -> Iterator[None]:
    """A context in which this thread's `attend` serves `step`."""
    torch.ops.draftline.begin_step(
        kv.data,
        block_size,
        _tensor(step.slots),
        _tensor(step.positions),
        _tensor(step.request_starts),
        _tensor(step.context_lens),
        _tensor(step.block_tables),
        *_trees_of(step),
    )
    try:
        yield
    finally:
        torch.ops.draftline.end_step()


def attend(  # noqa: PLR0917 - the operator's
    heads: Tensor, layer: int, num_heads: int, scaling: float,
    window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Store the keys and values of the rows, then attend; [rows, num_heads * head_dim].

    `heads` [rows, num_heads + 2 * kv_heads, head_dim]: queries, keys, values, rotated already.
    """
    return torch.ops.draftline.attend(heads, layer, num_heads, scaling, window, softcap)


def _trees_of(step: StepInput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where each request's tree begins, its slots and positions, and what its rows see of it."""
    trees = [tree for tree in step.trees if tree is not None]
    if not trees:
        starts = torch.zeros(len(step.trees) + 1, dtype=torch.int32)
        return starts, starts[:0], starts[:0], starts[:0].to(torch.uint8)
    lens = [0 if tree is None else len(tree.slots) for tree in step.trees]
    return (
        _tensor(np.cumsum([0, *lens], dtype=np.int32)),
        _tensor(np.concatenate([tree.slots for tree in trees])),
        _tensor(np.concatenate([tree.positions for tree in trees])),
        torch.from_numpy(np.concatenate([_visible(tree) for tree in trees]).view(np.uint8)),
    )


def _visible(tree: TreeRows) -> Bool:
    return unpack(tree.ancestors, len(tree.slots)).ravel()


def _tensor(array: np.ndarray) -> Tensor:
    # torch warns of arrays that came over a wire and cannot be written.
    if array.dtype != np.int32 or not array.flags.carray:
        array = np.array(array, dtype=np.int32)
    return torch.from_numpy(array)
