from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from draftline.core import sampling as reference
from draftline.core.sampling import SCREEN_MARGIN
from draftline.kernels.sampling.noise_kernels import EXACT, exact_noise, noise_bits, rough_noise
from draftline.kernels.sampling.reference import gumbel
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support.inputs.attention import DEVICE

EXTREMES = [0, 1, 2**31, 2**62, 2**63 - 1]
words = st.integers(0, 2**63 - 1) | st.sampled_from(EXTREMES)
triples = st.lists(
    st.tuples(words, words | st.integers(0, 4096), st.integers(0, 2**31 - 1)),
    min_size=1,
    max_size=200,
)


@given(triples)
def test_torch_noise_equals_numpy_noise_bit_by_bit(rows: list[tuple[int, int, int]]) -> None:
    seeds, positions, tokens = np.array(rows, dtype=np.int64).T.copy()
    wanted = reference.gumbel(seeds, positions, tokens)
    got = gumbel(*map(torch.from_numpy, (seeds, positions, tokens))).numpy()
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.int32), wanted.view(np.int32))


def test_a_whole_vocabulary_broadcasts_as_in_numpy() -> None:
    seeds = np.array([[7], [2**63 - 1]])
    positions = np.array([[0], [511]])
    tokens = np.arange(4096)
    got = gumbel(*map(torch.from_numpy, (seeds, positions, tokens))).numpy()
    np.testing.assert_array_equal(got, reference.gumbel(seeds, positions, tokens))


def test_noise_follows_the_gumbel_distribution() -> None:
    """Kolmogorov-Smirnov; a correct generator with another seed would fail once in a million."""
    tokens = torch.arange(100_000)
    sample = gumbel(torch.tensor(3), torch.tensor(11), tokens).numpy()
    assert stats.kstest(sample, stats.gumbel_r.cdf).pvalue > 1e-6


@triton.jit
def draw(keys, token_ids, exact, rough, bits, count, LEN: tl.constexpr):
    index = tl.arange(0, LEN)
    mask = index < count
    key = tl.load(keys + index, mask=mask, other=0)
    drawn = noise_bits(key, tl.load(token_ids + index, mask=mask, other=0))
    tl.store(bits + index, drawn, mask=mask)
    tl.store(exact + index, exact_noise(drawn), mask=mask)
    tl.store(rough + index, rough_noise(drawn), mask=mask)


@triton.jit
def turn_into_noise(bits, exact, rough, LEN: tl.constexpr):
    index = tl.arange(0, LEN)
    drawn = tl.load(bits + index)
    tl.store(exact + index, exact_noise(drawn))
    tl.store(rough + index, rough_noise(drawn))


def on_device(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).to(DEVICE)


def assert_noise(exact: Any, rough: Any, wanted: np.ndarray) -> None:
    found = exact.cpu().numpy()
    np.testing.assert_array_equal(found.view(np.int32), wanted.view(np.int32))
    # Rounding to float32 takes a share of the margin, too.
    np.testing.assert_allclose(rough.cpu().numpy(), wanted, rtol=0, atol=SCREEN_MARGIN / 4)


@settings(max_examples=10)
@given(triples)
def test_triton_noise_equals_numpy_noise_bit_by_bit(rows: list[tuple[int, int, int]]) -> None:
    seeds, positions, tokens = np.array(rows, dtype=np.int64).T.copy()
    keys = reference.stream_keys(seeds, positions).view(np.int64)
    exact, rough = torch.full((2, len(rows)), torch.nan, device=DEVICE)
    bits = torch.zeros(len(rows), dtype=torch.int64, device=DEVICE)
    arguments = (on_device(keys), on_device(tokens.astype(np.int32)), exact, rough, bits)
    draw[1,](*arguments, len(rows), LEN=256, **EXACT)
    assert_noise(exact, rough, reference.gumbel(seeds, positions, tokens))
    uniforms = (bits.cpu().numpy() + 0.5) * 2.0**-52
    np.testing.assert_array_equal(uniforms, reference.uniform(seeds, positions, tokens))


def test_extreme_bits_make_the_same_noise_and_are_screened_well() -> None:
    """Uniforms next to 0, 1/2 and 1, where logarithms are hardest."""
    near = np.arange(64)
    powers = 2 ** np.arange(52, dtype=np.int64)
    ends = np.concatenate((near, 2**51 - near, 2**51 + near, 2**52 - 1 - near))
    bits = np.concatenate((ends, powers, 2**52 - powers, 2**51 + powers[:50]))
    random = np.random.default_rng(0).integers(0, 2**52, 2048 - len(bits))
    bits = np.concatenate((bits, random))
    exact, rough = torch.full((2, 2048), torch.nan, device=DEVICE)
    turn_into_noise[1,](on_device(bits), exact, rough, LEN=2048, **EXACT)
    assert_noise(exact, rough, reference.gumbel_of((bits + 0.5) * 2.0**-52))
