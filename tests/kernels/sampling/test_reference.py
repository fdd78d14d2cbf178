"""The torch sampler against the numpy rule, transformers' processors and the distribution."""

import numpy as np
import pytest
import torch
from draftline.core import sampling as reference
from draftline.core.arrays import Float32
from draftline.core.sampling import gumbel
from draftline.core.steps import SamplingRows
from draftline.kernels.sampling.reference import choose_tokens, noisy_argmax, stream_keys
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


def sampling_rows(
    num_rows: int, temperature: object = 0, top_k: object = 0, top_p: object = 1,
    min_p: object = 0, typical_p: object = 1, *, seed: object = 0, position: object = 0,
) -> SamplingRows:  # fmt: skip
    def rows(value: object, dtype: type) -> np.ndarray:
        return np.ascontiguousarray(np.broadcast_to(np.asarray(value, dtype=dtype), num_rows))

    return SamplingRows(
        rows(temperature, np.float32), rows(top_k, np.int32), rows(top_p, np.float32),
        rows(min_p, np.float32), rows(typical_p, np.float32), rows(seed, np.int64),
        rows(position, np.int64),
    )  # fmt: skip


def torch_choice(logits: Float32, sampling: SamplingRows) -> np.ndarray:
    chosen = choose_tokens(torch.from_numpy(logits), sampling)
    assert chosen.dtype == torch.int32
    return chosen.numpy()


@given(st.integers(0, 2**32), st.integers(2, 300), st.sampled_from([0.1, 1.0, 5.0, 40.0]))
def test_torch_chooses_what_numpy_chooses(case: int, vocab_size: int, spread: float) -> None:
    random = np.random.default_rng(case)
    num_rows = 40
    logits = (random.normal(size=(num_rows, vocab_size)) * spread).astype(np.float32)
    sampling = sampling_rows(
        num_rows,
        temperature=random.choice([0, 1e-6, 0.3, 0.7, 1, 2, 100], num_rows),
        top_k=random.choice([0, 1, 2, 20, vocab_size, 10 * vocab_size], num_rows),
        top_p=random.choice([1, 1e-6, 0.1, 0.5, 0.9, 0.999], num_rows),
        min_p=random.choice([0, 1e-3, 0.1, 0.5, 1], num_rows),
        typical_p=random.choice([1, 1e-6, 0.2, 0.9], num_rows),
        seed=random.integers(0, 2**63 - 1, num_rows),
        position=random.integers(0, 10**6, num_rows),
    )
    np.testing.assert_array_equal(
        torch_choice(logits, sampling), reference.choose_tokens(logits, sampling)
    )


@pytest.mark.parametrize("temperature", [0, 0.7, 1.5])
def test_a_vocabulary_of_real_size(temperature: float) -> None:
    random = np.random.default_rng(5)
    logits = (random.normal(size=(64, 32_000)) * 3).astype(np.float32)
    sampling = sampling_rows(64, temperature, seed=np.arange(64), position=9)
    np.testing.assert_array_equal(
        torch_choice(logits, sampling), reference.choose_tokens(logits, sampling)
    )


@pytest.mark.parametrize("choose", [torch_choice, reference.choose_tokens])
def test_greedy_takes_the_lowest_of_equal_tokens(choose: object) -> None:
    logits = np.zeros((2, 50), dtype=np.float32)
    logits[1, [7, 30]] = 1
    assert choose(logits, sampling_rows(2)).tolist() == [0, 7]  # type: ignore[operator]


@pytest.mark.parametrize("choose", [torch_choice, reference.choose_tokens])
def test_a_vanishing_temperature_or_top_p_or_a_full_min_p_is_greedy(choose: object) -> None:
    logits = np.random.default_rng(0).normal(size=(90, 60)).astype(np.float32)
    greedy = logits.argmax(axis=-1).tolist()
    for options in ({"temperature": 1e-30}, {"top_p": 1e-40}, {"top_k": 1}, {"min_p": 1}):
        sampling = sampling_rows(90, **{"temperature": 1, "seed": range(90), **options})
        assert choose(logits, sampling).tolist() == greedy  # type: ignore[operator]


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    logits = np.random.default_rng(1).normal(size=(8, 80)).astype(np.float32)
    mixed = sampling_rows(
        8, [0, 1, 0, 0.5, 1, 1, 2, 1], [0, 0, 5, 0, 9, 0, 0, 0], [1, 1, 1, 0.5, 1, 1, 1, 0.9],
        [0, 0, 0, 0, 0, 0.2, 0, 0], seed=range(8), position=range(8),
    )  # fmt: skip
    together = torch_choice(logits, mixed)
    for row in range(8):
        alone = SamplingRows(*(getattr(mixed, name)[row : row + 1] for name in mixed.__slots__))
        assert torch_choice(logits[row : row + 1], alone)[0] == together[row]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "typical_p"),
    [
        (0, 1, 0, 1), (5, 1, 0, 1), (0, 0.8, 0, 1), (0, 1, 0.1, 1), (0, 1, 0, 0.3), (0, 1, 0, 0.9),
        (12, 0.9, 0.05, 1), (30, 0.5, 0.3, 1), (12, 0.9, 0.05, 0.7),
    ],
)  # fmt: skip
def test_the_processed_distribution_is_that_of_transformers(
    top_k: int, top_p: float, min_p: float, typical_p: float
) -> None:
    random = np.random.default_rng(2)
    sampling = sampling_rows(1, 0.7, top_k, top_p, min_p, typical_p)
    for _ in range(50):
        logits = random.normal(size=40).astype(np.float32) * 2
        scores = TemperatureLogitsWarper(0.7)(None, torch.from_numpy(logits)[None])  # type: ignore[arg-type]
        if top_k:
            scores = TopKLogitsWarper(top_k)(None, scores)  # type: ignore[arg-type]
        if top_p < 1:
            scores = TopPLogitsWarper(top_p)(None, scores)  # type: ignore[arg-type]
        if min_p:
            scores = MinPLogitsWarper(min_p)(None, scores)  # type: ignore[arg-type]
        if typical_p < 1:
            scores = TypicalLogitsWarper(typical_p)(None, scores)  # type: ignore[arg-type]
        ours = torch.from_numpy(reference.process_logits(logits, sampling, 0))
        torch.testing.assert_close(torch.softmax(ours, -1), torch.softmax(scores[0], -1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"typical_p": 0.5},
        {"top_k": 6, "top_p": 0.8, "min_p": 0.1},
    ],
)
def test_chosen_tokens_follow_the_processed_distribution(options: dict[str, float]) -> None:
    """Chi-square over 8 tokens; a correct sampler with other seeds would fail once in a million."""
    num_rows = 20_000
    logits = np.array([1.0, 0.5, 2.0, -1.0, 0.0, 1.5, -0.5, 0.2], dtype=np.float32)
    sampling = sampling_rows(
        num_rows, 1.3, **options, seed=np.arange(num_rows) // 100, position=np.arange(num_rows)
    )
    chosen = torch_choice(np.tile(logits, (num_rows, 1)), sampling)
    distribution = np.exp(reference.process_logits(logits, sampling, 0).astype(np.float64))
    counts = np.bincount(chosen, minlength=8)
    assert counts[distribution == 0].sum() == 0
    expected = (distribution / distribution.sum())[distribution > 0] * num_rows
    assert stats.chisquare(counts[distribution > 0], expected).pvalue > 1e-6


def test_the_winner_needs_exact_noise_only_where_it_is_close() -> None:
    """Two tokens whose sums differ by one float32 step: the screen alone could not tell."""
    tokens = np.arange(2)
    for seed in range(200):
        noise = gumbel(np.array([seed]), np.array([3]), tokens)
        logits = np.array([[0, noise[0] - noise[1]]], dtype=np.float32)
        sampling = sampling_rows(1, 1, seed=seed, position=3)
        wanted = reference.choose_tokens(logits, sampling)
        np.testing.assert_array_equal(torch_choice(logits, sampling), wanted)


def test_the_screens_of_numpy_and_torch_lose_no_winner() -> None:
    random = np.random.default_rng(8)
    scaled = random.normal(size=(300, 500)).astype(np.float32) * 2
    scaled -= scaled.max(axis=-1, keepdims=True)
    seeds, positions = random.integers(0, 2**63 - 1, (2, 300))
    noise = gumbel(seeds[:, None], positions[:, None], np.arange(500))
    wanted = (scaled + noise).argmax(axis=-1).tolist()
    assert reference.noisy_argmax(scaled, seeds, positions).tolist() == wanted
    columns = (torch.from_numpy(values)[:, None] for values in (seeds, positions))
    assert noisy_argmax(torch.from_numpy(scaled), stream_keys(*columns)).tolist() == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_columns_of_some_tokens_have_the_noise_of_these(temperature: float) -> None:
    random = np.random.default_rng(9)
    wide = np.full((40, 500), -np.inf, dtype=np.float32)
    ids = random.permutation(500)[:60]
    wide[:, ids] = random.normal(size=(40, 60))
    sampling = sampling_rows(40, temperature, seed=3, position=np.arange(40))
    narrow = torch.from_numpy(wide[:, ids])
    columns = choose_tokens(narrow, sampling, torch.from_numpy(ids))
    assert ids[columns].tolist() == reference.choose_tokens(wide, sampling).tolist()
