"""Checks that a model gives the same logits for a text, for its pieces, and for the paths of a
tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import ROOT, Bool, Int32
from ...core.errors import CheckpointError
from ...core.steps import SamplingRows, StepInput, TreeRows
from ...core.tree.tree_loops import pack

# Tolerance relative to the largest logit, for rounding with other shapes, also in 16 bits.
TOLERANCE = 0.05
LENGTH = 12
# A root with two children, the first of which has one.
PARENTS = (ROOT, ROOT, 0)


class Checked(Protocol):
    """The stage to check; its KV cache is overwritten."""

    @property
    def model_type(self) -> str:
        """As the config names it."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids that it reads."""
        ...

    def all_logits(self, step: StepInput) -> Tensor:
        """Logits of all rows of a step."""
        ...


def check_pieces(stage: Checked, block_size: int) -> None:
    """Raise `CheckpointError` unless a text fed in pieces gets the logits of the whole text."""
    tokens = _text(stage)
    whole = stage.all_logits(_step(tokens, 0, block_size))
    pieces = [
        stage.all_logits(_step(tokens[first:last], first, block_size))
        for first, last in ((0, 5), (5, 6), (6, LENGTH))
    ]
    if not _alike(torch.cat(pieces), whole):
        raise CheckpointError(
            f"model_type {stage.model_type!r} does not go on from keys and values alone; it cannot "
            "draft"
        )


def check_trees(stage: Checked, block_size: int) -> None:
    """Raise `CheckpointError` unless nodes of a tree get the logits of their paths."""
    tokens = _text(stage)
    nodes = np.array([3, 4, 5], dtype=np.int32) % stage.vocab_size
    paths = [_path(node) for node in range(len(nodes))]
    expected = [
        stage.all_logits(_step(np.concatenate([tokens, nodes[path]]), 0, block_size))[-1]
        for path in paths
    ]
    stage.all_logits(_step(tokens, 0, block_size))
    mask = np.zeros((len(nodes), len(nodes)), dtype=np.bool_)
    for node, path in enumerate(paths):
        mask[node, path] = True
    depths = np.array([len(path) for path in paths], dtype=np.int32)
    step = _step(nodes, LENGTH, block_size, mask, depths + np.int32(LENGTH - 1))
    try:
        is_right = _alike(stage.all_logits(step), torch.stack(expected))
    except (ValueError, RuntimeError, IndexError, TypeError):
        # The model expects a mask of another shape.
        is_right = False
    if not is_right:
        raise CheckpointError(
            f"model_type {stage.model_type!r} takes no masks of trees; use tree: chain"
        )


def _path(node: int) -> list[int]:
    return [] if node == ROOT else [*_path(PARENTS[node]), node]


def _text(stage: Checked) -> Int32:
    return (7 * np.arange(1, LENGTH + 1, dtype=np.int32)) % np.int32(stage.vocab_size)


def _alike(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * other.abs().max())


def _step(
    tokens: Int32, first: int, block_size: int,
    mask: Bool | None = None, positions: Int32 | None = None,
) -> StepInput:  # fmt: skip
    """A step that feeds these at `first` of the only request, whose slots are the first ones."""
    slots = np.arange(first, first + len(tokens), dtype=np.int32)
    positions = slots if positions is None else positions
    trees: Sequence[TreeRows | None] = (None,)
    if mask is not None:
        trees = (TreeRows(pack(mask), slots, positions),)
    none = np.empty(0, dtype=np.int32)
    num_blocks = -(-(first + len(tokens)) // block_size)
    return StepInput(
        step_id=0,
        moves=np.empty((0, 2), dtype=np.int32),
        token_ids=tokens,
        positions=positions,
        slots=slots,
        request_starts=np.array([0, len(tokens)], dtype=np.int32),
        context_lens=np.array([first], dtype=np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        trees=trees,
        logits_rows=none,
        sampling=SamplingRows.greedy(np.empty(0, dtype=np.int64)),
    )
