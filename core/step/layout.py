"""The compiled loops that give every row of a step its token, its place and its KV slot."""

from __future__ import annotations

import numpy as np

from ..arrays import Int32, Int64
from ..compiled import compiled
from ..tree.tree_loops import DEPTH, TOKEN


@compiled
def lay_out(  # noqa: PLR0913, PLR0917 - flat arrays, and one loop over them
    nodes: Int32,
    node_ends: Int64,
    roots: Int32,
    probe_tokens: Int32,
    probe_offsets: Int32,
    num_probes: Int32,
    chunk_tokens: Int32,
    chunk_rows: Int32,
    chunk_chosen: Int32,
    context_lens: Int32,
    block_tables: Int32,
    block_size: int,
) -> tuple[Int32, Int32, Int32, Int32, Int32, Int32]:
    """The rows of all requests: those of trees first, then prompt chunks.

    nodes, node_ends, roots  of the trees, as in `TreeBatch`; the last committed token of each
    probe_tokens, probe_offsets, num_probes  all probe rows, and how many each tree has
    chunk_tokens, chunk_rows, chunk_chosen   all prompt rows, how many each chunk has, and how many
                             of these, the last ones, get a target token
    context_lens, block_tables, block_size   of all requests, as in `StepInput`

    Gives token ids, positions and KV slots, int32 [rows]; where each request's rows begin, int32
    [requests + 1]; the rows that get a target token; how many of them each request has, int32
    [requests].
    """
    num_trees, num_parts = len(node_ends), len(context_lens)
    total = num_trees + len(nodes) + len(probe_tokens) + len(chunk_tokens)
    token_ids = np.empty(total, dtype=np.int32)
    positions = np.empty(total, dtype=np.int32)
    starts = np.zeros(num_parts + 1, dtype=np.int32)
    chosen = np.empty(num_parts, dtype=np.int32)
    row, node, probe = 0, 0, 0
    for tree in range(num_trees):
        context_len, first = context_lens[tree], row
        token_ids[row], positions[row] = roots[tree], context_len
        row += 1
        while node < node_ends[tree]:
            token_ids[row] = nodes[node, TOKEN]
            positions[row] = context_len + nodes[node, DEPTH]
            row += 1
            node += 1
        chosen[tree] = row - first
        for _ in range(num_probes[tree]):
            token_ids[row] = probe_tokens[probe]
            positions[row] = context_len + probe_offsets[probe]
            row += 1
            probe += 1
        starts[tree + 1] = row
    token_ids[row:] = chunk_tokens
    for chunk in range(num_parts - num_trees):
        for index in range(chunk_rows[chunk]):
            positions[row] = context_lens[num_trees + chunk] + index
            row += 1
        chosen[num_trees + chunk] = chunk_chosen[chunk]
        starts[num_trees + chunk + 1] = row
    slots = _slots(starts, context_lens, block_tables, block_size)
    return token_ids, positions, slots, starts, _chosen_rows(starts, chosen, num_trees), chosen


@compiled
def fill_tables(blocks: Int32, counts: Int64) -> Int32:
    """int32 [requests, most blocks]: the blocks of each, `counts` of them, zeros behind them."""
    tables = np.zeros((len(counts), counts.max()), dtype=np.int32)
    first = 0
    for request in range(len(counts)):
        for place in range(counts[request]):
            tables[request, place] = blocks[first + place]
        first += counts[request]
    return tables


@compiled
def _slots(starts: Int32, context_lens: Int32, block_tables: Int32, block_size: int) -> Int32:
    """A row's KV stands where its place in the request says, not its depth in a tree."""
    slots = np.empty(starts[-1], dtype=np.int32)
    for part in range(len(context_lens)):
        for row in range(starts[part], starts[part + 1]):
            place = context_lens[part] + row - starts[part]
            slots[row] = kv_slot(block_tables[part], place, block_size)
    return slots


@compiled
def kv_slot(table: Int32, position: int, block_size: int) -> int:
    """The KV slot of a position, whose request has the blocks int32 [blocks] of `table`."""
    return table[position // block_size] * block_size + position % block_size


@compiled
def kv_slots(block_tables: Int32, owners: Int32, positions: Int32, block_size: int) -> Int32:
    """int32 [n]: KV slots of positions int32 [n] in the tables `owners` int32 [n] of all."""
    slots = np.empty(len(positions), dtype=np.int32)
    for index in range(len(positions)):
        slots[index] = kv_slot(block_tables[owners[index]], positions[index], block_size)
    return slots


@compiled
def _chosen_rows(starts: Int32, chosen: Int32, num_trees: int) -> Int32:
    """The first rows of trees, the last ones of chunks."""
    rows = np.empty(chosen.sum(), dtype=np.int32)
    count = 0
    for part in range(len(chosen)):
        first = starts[part] if part < num_trees else starts[part + 1] - chosen[part]
        for index in range(chosen[part]):
            rows[count] = first + index
            count += 1
    return rows
