"""Decoding steps as the engine builds them: a root and a tree of nodes for every request."""

from __future__ import annotations

import numpy as np

from ....core.arrays import Bool, Int32
from ....core.step.layout import kv_slots
from ....core.steps import SamplingRows, StepInput, TreeRows
from ....core.tree.kernels import pack
from ..plan import StepCase

NONE = np.empty(0, dtype=np.int32)


def decode_step(case: StepCase, num_blocks: int, block_size: int, vocab_size: int) -> StepInput:
    """Greedy; the blocks of the requests lie anywhere in a cache of `num_blocks`, none twice."""
    rng = np.random.default_rng(0)
    rows_each, num_rows = case.rows_each, case.batch * case.rows_each
    width = case.num_slots(block_size) // block_size // case.batch
    blocks = rng.permutation(num_blocks)[: case.batch * width].astype(np.int32)
    tables = blocks.reshape(case.batch, width)
    visible = tree_mask(case.nodes)
    depths = visible.sum(axis=1, dtype=np.int32) - 1
    positions = case.context_len + depths
    slots = [_slots(table, case.context_len, rows_each, block_size) for table in tables]
    bits = pack(visible)
    all_positions = np.tile(positions, case.batch)
    return StepInput(
        step_id=0,
        moves=NONE.reshape(0, 2),
        token_ids=rng.integers(vocab_size, size=num_rows, dtype=np.int32),
        positions=all_positions,
        slots=np.concatenate(slots),
        request_starts=np.arange(case.batch + 1, dtype=np.int32) * rows_each,
        context_lens=np.full(case.batch, case.context_len, dtype=np.int32),
        block_tables=tables,
        trees=tuple(TreeRows(bits, own, positions) for own in slots),
        logits_rows=np.arange(num_rows, dtype=np.int32),
        sampling=SamplingRows.greedy(all_positions.astype(np.int64) + 1),
        probe_rows=NONE,
        probe_top_k=0,
        scored_rows=NONE,
        scored_tokens=NONE,
    )


def tree_mask(nodes: int) -> Bool:
    """Who sees whom in a root with a binary tree of `nodes` under it, [1 + nodes, 1 + nodes]."""
    visible = np.eye(1 + nodes, dtype=np.bool_)
    for row in range(1, 1 + nodes):
        visible[row] |= visible[(row - 1) // 2]
    return visible


def _slots(table: Int32, first: int, count: int, block_size: int) -> Int32:
    places = np.arange(first, first + count, dtype=np.int32)
    return kv_slots(table[None], np.zeros_like(places), places, block_size)
