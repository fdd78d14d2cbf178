from __future__ import annotations

import numpy as np
import pytest
from draftline.retrieval_store.segment.suffix_array import sort_suffixes
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.sampled_from([1, 2, 8, 32]))
def test_equals_sorting_the_windows(tokens: list[int], depth: int) -> None:
    text = np.array(tokens, dtype=np.uint32)
    suffixes, lens = sort_suffixes(text, depth)
    windows = [tokens[start : start + depth] for start in range(len(tokens))]
    assert suffixes.tolist() == sorted(range(len(tokens)), key=lambda p: (windows[p], p))
    assert lens[0] == 0
    for place in range(1, len(tokens)):
        left, right = windows[suffixes[place - 1]], windows[suffixes[place]]
        same = [a == b for a, b in zip(left, right, strict=False)]
        assert lens[place] == (same.index(False) if False in same else len(same))


def test_worked_example() -> None:
    # b a n a n a, with a = 0, b = 1, n = 2: a, ana, anana, banana, na, nana
    text = np.array([1, 0, 2, 0, 2, 0], dtype=np.uint32)
    suffixes, lens = sort_suffixes(text, 8)
    assert suffixes.tolist() == [5, 3, 1, 0, 4, 2]
    assert lens.tolist() == [0, 1, 3, 0, 0, 2]
    assert (suffixes.dtype, lens.dtype) == (np.uint32, np.uint8)


@pytest.mark.parametrize("tokens", [[], [7], [2**32 - 1]])
def test_tiny_texts(tokens: list[int]) -> None:
    text = np.array(tokens, dtype=np.uint32)
    suffixes, lens = sort_suffixes(text, 32)
    assert suffixes.tolist() == list(range(len(tokens)))
    assert lens.tolist() == [0] * len(tokens)


def test_large_ids_and_separators_keep_their_order() -> None:
    """One key holds few tokens of a large vocabulary, so groups are read level by level."""
    separator = 2**32 - 1
    rng = np.random.default_rng(0)
    text = rng.choice([5, 3_000_000, 3_000_001, separator], 600).astype(np.uint32)
    text[300:] = text[:300]
    suffixes, lens = sort_suffixes(text, 32)
    windows = [text[start : start + 32].tolist() for start in range(len(text))]
    assert suffixes.tolist() == sorted(range(len(text)), key=lambda p: (windows[p], p))
    assert lens.max() == 32
