"""Rows of a step against the loops that they stand for."""

import numpy as np
from draftline.core.step.builder import lay_out
from draftline.core.tree.kernels import runs
from hypothesis import given
from hypothesis import strategies as st

COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@given(COUNTS, st.data())
def test_runs_follow_each_other(counts: list[int], data: st.DataObject) -> None:
    firsts = data.draw(st.lists(st.integers(0, 99), min_size=len(counts), max_size=len(counts)))
    found = runs(np.array(firsts, dtype=np.int32), np.array(counts, dtype=np.int32))
    pairs = zip(firsts, counts, strict=True)
    assert found.tolist() == [first + own for first, count in pairs for own in range(count)]
    assert found.dtype == np.int32


@given(COUNTS, st.integers(1, 4), st.data())
def test_rows_stand_behind_their_context(
    counts: list[int], block_size: int, data: st.DataObject
) -> None:
    contexts = data.draw(st.lists(st.integers(0, 20), min_size=len(counts), max_size=len(counts)))
    num_trees = data.draw(st.integers(0, len(counts)))
    offsets = np.arange(sum(counts[:num_trees]), dtype=np.int32) % 3
    width = max(map(sum, zip(contexts, counts, strict=True))) // block_size + 1
    tables = np.random.default_rng(0).permutation(len(counts) * width).reshape(len(counts), width)
    slots, positions = lay_out(
        np.array(counts, dtype=np.int32),
        np.array(contexts, dtype=np.int32),
        tables.astype(np.int32),
        offsets,
        block_size,
    )
    row = 0
    for table, context, count in zip(tables.tolist(), contexts, counts, strict=True):
        for own in range(count):
            block, rest = divmod(context + own, block_size)
            assert slots[row] == table[block] * block_size + rest
            assert positions[row] == context + (offsets[row] if row < len(offsets) else own)
            row += 1
    assert row == len(slots) == len(positions)
