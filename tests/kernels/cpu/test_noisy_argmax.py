"""The own operator's tokens, against those of `core/sampling.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from draftline.core.sampling import noisy_argmax
from hypothesis import given
from hypothesis import strategies as st
from support.tools.cpu_kernels import load_cpu_kernels

pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    load_cpu_kernels()


@given(
    st.integers(0, 2**32),
    st.integers(1, 3000),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.01, 1.0, 8.0, 90.0]),
    st.sampled_from([0.0, 0.9, 1.0]),
)
def test_tokens_are_those_of_the_reference(
    seed: int, vocab_size: int, rows: int, spread: float, share_left_out: float
) -> None:
    """Flat and peaked rows, ties, and rows of which all but a few tokens cannot be chosen."""
    rng = np.random.default_rng(seed)
    logits = (spread * rng.normal(size=(rows, vocab_size))).astype(np.float32)
    if seed % 2:
        logits = np.round(logits)
    best = logits.argmax(axis=1)
    logits[rng.random(logits.shape) < share_left_out] = -np.inf
    logits[np.arange(rows), best] = 0.0
    logits = np.minimum(logits, 0.0)
    keys = [rng.integers(low, 2**62, rows) for low in (-(2**62), 0)]
    found = torch.ops.draftline.noisy_argmax(*map(torch.from_numpy, (logits, *keys)))
    assert np.array_equal(found.numpy(), noisy_argmax(logits, *keys))
    ids = rng.permutation(2 * vocab_size)[:vocab_size]
    found = torch.ops.draftline.noisy_argmax(*map(torch.from_numpy, (logits, *keys, ids)))
    assert np.array_equal(found.numpy(), noisy_argmax(logits, *keys, ids))


def test_without_a_number_the_first_token_is_taken() -> None:
    logits = np.full((2, 100), np.nan, dtype=np.float32)
    keys = np.zeros(2, dtype=np.int64), np.arange(2)
    found = torch.ops.draftline.noisy_argmax(*map(torch.from_numpy, (logits, *keys)))
    assert np.array_equal(found.numpy(), noisy_argmax(logits, *keys))
