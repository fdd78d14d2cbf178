"""The loops over the rows of a step, compiled; `core/step/builder.py` uses them."""

from __future__ import annotations

import numpy as np

from ..arrays import Int32
from ..compiled import compiled


@compiled
def lay_out(
    counts: Int32, context_lens: Int32, block_tables: Int32, offsets: Int32, block_size: int
) -> tuple[Int32, Int32]:
    """KV slots and positions of all rows, `counts[i]` of request i.

    A row's KV stands where its place in the request says, not its depth in a tree. Its position is
    `offsets[row]` behind its request's context; rows without an offset, the last ones, follow each
    other.
    """
    total = counts.sum()
    slots = np.empty(total, dtype=np.int32)
    positions = np.empty(total, dtype=np.int32)
    row = 0
    for request in range(len(counts)):
        context_len = context_lens[request]
        for own in range(counts[request]):
            place = context_len + own
            block = block_tables[request, place // block_size]
            slots[row] = block * block_size + place % block_size
            positions[row] = context_len + (offsets[row] if row < len(offsets) else own)
            row += 1
    return slots, positions
