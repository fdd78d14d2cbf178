"""Device tables stay within their bytes, whatever sizes are asked for."""

from __future__ import annotations

import numpy as np
import torch
from draftline.core.request.allowed_tokens import full_mask
from draftline.core.steps import LogitEdits
from draftline.kernels.device_tables import RecentTables
from draftline.kernels.sampling.edit_tables import EditCapacity, EditTables
from hypothesis import given
from hypothesis import strategies as st


class Table:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


@given(st.lists(st.integers(1, 12), max_size=40))
def test_the_bytes_are_bounded_and_the_last_is_kept(sizes: list[int]) -> None:
    tables: RecentTables[int, Table] = RecentTables(10)
    for size in sizes:
        table = tables.get(size, lambda size=size: Table(size))
        assert table.num_bytes == size
        assert tables.get(size, lambda: Table(0)) is table
        assert tables.num_bytes == size or tables.num_bytes <= 10


def test_those_asked_for_longest_ago_go_first() -> None:
    tables: RecentTables[str, Table] = RecentTables(10)
    first, second = (tables.get(name, lambda: Table(4)) for name in "ab")
    assert tables.get("a", lambda: Table(4)) is first
    tables.get("c", lambda: Table(4))
    assert tables.get("a", lambda: Table(4)) is first
    assert tables.get("b", lambda: Table(4)) is not second


def test_masks_of_many_sizes_are_counted() -> None:
    """Edits of 1 to 64 masks over a vocabulary of 128k: 16 KiB a mask."""
    tables: RecentTables[EditCapacity, EditTables] = RecentTables(2**20)
    vocab_size, device = 128_256, torch.device("cpu")
    none = np.empty(0, dtype=np.int32)
    for count in (1, 2, 4, 8, 16, 32, 64):
        mask = np.repeat(full_mask(vocab_size)[None], count, axis=0)
        edits = [LogitEdits(0, count, none, none.astype(np.float32), None, mask)]
        capacity = EditCapacity.of(edits, count)
        kept = tables.get(capacity, lambda key=capacity: EditTables(key, vocab_size, device))
        kept.refill(edits)
        assert kept.num_bytes >= count * vocab_size // 8
        assert tables.num_bytes in range(kept.num_bytes, max(2**20, kept.num_bytes) + 1)
