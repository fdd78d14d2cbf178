import numpy as np
import torch
from draftline.core import noise as reference
from draftline.kernels.noise_reference import gumbel
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

EXTREMES = [0, 1, 2**31, 2**62, 2**63 - 1]
words = st.integers(0, 2**63 - 1) | st.sampled_from(EXTREMES)
triples = st.lists(
    st.tuples(words, words | st.integers(0, 4096), st.integers(0, 2**31 - 1)),
    min_size=1,
    max_size=200,
)


@settings(max_examples=60, deadline=None)
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


def test_noise_follows_the_gumbel_law() -> None:
    """Kolmogorov-Smirnov; a correct generator with another seed would fail once in a million."""
    tokens = torch.arange(100_000)
    sample = gumbel(torch.tensor(3), torch.tensor(11), tokens).numpy()
    assert stats.kstest(sample, stats.gumbel_r.cdf).pvalue > 1e-6
