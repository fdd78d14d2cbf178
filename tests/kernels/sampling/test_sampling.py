"""Sampling kernels and their torch reference against `core/sampling.py`, token by token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from draftline.core import sampling as core
from draftline.core.arrays import Float32
from draftline.core.steps import SamplingRows
from draftline.kernels.sampling import choose as sampling_kernels
from draftline.kernels.sampling import reference as sampling_reference
from draftline.kernels.sampling.sampler import takes
from draftline.kernels.sampling.tables import SamplingScratch, SamplingTables, least_kept
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.inputs.attention import DEVICE

IMPLEMENTATIONS = ["reference", "triton"]
POISON = {torch.float32: torch.nan, torch.int32: -7, torch.int64: -(2**62)}


def rows_of(num_rows: int, **values: Any) -> SamplingRows:
    """Sampled at temperature 1 and unfiltered where nothing else is said."""
    plain: dict[str, tuple[type, Any]] = {
        "temperature": (np.float32, 1), "top_k": (np.int32, 0), "top_p": (np.float32, 1),
        "min_p": (np.float32, 0), "typical_p": (np.float32, 1),
        "seed": (np.int64, np.arange(num_rows)), "position": (np.int64, 5),
    }  # fmt: skip
    return SamplingRows(**{
        name: np.ascontiguousarray(np.broadcast_to(np.array(values.get(name, v), kind), num_rows))
        for name, (kind, v) in plain.items()
    })  # fmt: skip


def scratch_of(tables: SamplingTables, **options: int) -> SamplingScratch:
    """Small parts, so that small vocabularies have several; every number in it is wrong."""
    sizes = {"chunk_len": 256, "room": 128} | options
    scratch = SamplingScratch(tables.capacity, tables.vocab_size, DEVICE, **sizes)
    for value in vars(scratch).values():
        if isinstance(value, torch.Tensor):
            value.fill_(POISON[value.dtype])
    return scratch


def chosen(
    name: str, logits: Float32 | torch.Tensor, sampling: SamplingRows, **options: int
) -> Any:
    data = torch.as_tensor(logits).to(DEVICE)
    if name == "reference":
        return sampling_reference.choose_tokens(data, sampling).cpu().numpy()
    tables = SamplingTables(len(data) + 1, data.shape[1], DEVICE)
    tables.refill(sampling)
    return run(data, tables, **options)[: len(data)]


def run(data: torch.Tensor, tables: SamplingTables, **options: int) -> Any:
    out = torch.full((tables.capacity,), -7, dtype=torch.int32, device=DEVICE)
    sampling_kernels.choose_tokens(data, tables, scratch_of(tables, **options), out)
    return out.cpu().numpy()


def random_rows(random: np.random.Generator, num_rows: int, vocab_size: int) -> SamplingRows:
    return rows_of(
        num_rows,
        temperature=random.choice([0, 1e-6, 0.3, 0.7, 1, 2, 100], num_rows),
        top_k=random.choice([0, 0, 1, 2, 20, vocab_size, 10 * vocab_size], num_rows),
        top_p=random.choice([1, 1, 1e-6, 0.1, 0.5, 0.9, 0.999, 1 - 2**-24], num_rows),
        min_p=random.choice([0, 1e-3, 0.1, 0.5, 1], num_rows),
        seed=random.integers(0, 2**63 - 1, num_rows),
        position=random.integers(0, 10**6, num_rows),
    )


STEPS = {
    "case": st.integers(0, 2**32),
    "vocab_size": st.integers(1, 400) | st.sampled_from([256, 257, 600]),
    "spread": st.sampled_from([0.0, 0.05, 1.0, 5.0, 40.0]),
    "is_coarse": st.booleans(),
}


def assert_chosen(
    name: str, case: int, vocab_size: int, spread: float, num_rows: int, *, is_coarse: bool
) -> None:
    """Coarse logits are often equal; what is in doubt may have no room."""
    random = np.random.default_rng(case)
    logits = random.normal(size=(num_rows, vocab_size)) * spread
    logits = (np.round(logits) if is_coarse else logits).astype(np.float32)
    sampling = random_rows(random, num_rows, vocab_size)
    found = chosen(name, logits, sampling)
    np.testing.assert_array_equal(found, core.choose_tokens(logits, sampling))


@given(**STEPS)
def test_the_reference_chooses_what_numpy_chooses(
    case: int, vocab_size: int, spread: float, is_coarse: bool
) -> None:
    assert_chosen("reference", case, vocab_size, spread, 20, is_coarse=is_coarse)


@settings(max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(**STEPS)
def test_the_kernels_choose_what_numpy_chooses(
    case: int, vocab_size: int, spread: float, is_coarse: bool
) -> None:
    assert_chosen("triton", case, vocab_size, spread, 3, is_coarse=is_coarse)


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("vocab_size", [1, 257, 5000])
def test_many_rows(vocab_size: int, spread: float) -> None:
    for case in range(10):
        assert_chosen("triton", case, vocab_size, spread, 200, is_coarse=case % 2 == 0)


def by_sorting(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """`keep_top` by a sort of the whole vocabulary."""
    order = scaled.argsort(dim=-1, descending=True, stable=True)
    ranked = scaled.gather(-1, order)
    vocab_size = scaled.shape[-1]
    last = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).long() - 1
    ranked = ranked.masked_fill(ranked < ranked.gather(-1, last), -torch.inf)
    weights = torch.exp(ranked.double())
    above = weights.cumsum(dim=-1) - weights
    outside = (above >= top_p.double() * weights.sum(dim=-1, keepdim=True)) & (top_p < 1)
    outside[:, 0] = False
    ranked = ranked.masked_fill(outside, -torch.inf)
    return torch.empty_like(scaled).scatter_(-1, order, ranked)


@given(**STEPS)
def test_what_is_kept_is_what_a_sort_keeps(
    case: int, vocab_size: int, spread: float, is_coarse: bool
) -> None:
    """Tokens that tie, that are masked and rows without filters among them."""
    random = np.random.default_rng(case)
    logits = random.normal(size=(20, vocab_size)) * spread
    logits = np.round(logits) if is_coarse else logits
    is_masked = random.random(logits.shape) < random.choice([0, 0.3, 0.9], (20, 1))
    is_masked[:, 0] = False
    logits[is_masked] = -np.inf
    sampling = random_rows(random, 20, vocab_size)
    columns = (sampling.temperature + np.float32(1e-3), sampling.top_k, sampling.top_p)
    temperatures, *filters = (torch.tensor(values)[:, None] for values in columns)
    scaled = sampling_reference.shifted(torch.from_numpy(logits).float(), temperatures)
    expected = by_sorting(scaled, *filters)
    torch.testing.assert_close(
        sampling_reference.keep_top(scaled, *filters), expected, rtol=0, atol=0
    )


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0}, {}, {"min_p": 0.05}, {"top_k": 40}, {"top_p": 0.9},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.01}, {"temperature": 0.05, "top_k": 300},
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kind_of_row_beside_the_others(dtype: torch.dtype) -> None:
    random = np.random.default_rng(3)
    data = torch.from_numpy(random.normal(size=(len(FILTERS), 1300)) * 3).to(dtype)
    logits = data.float().numpy()
    columns = {name: [kind.get(name, plain) for kind in FILTERS] for name, plain in (
        ("temperature", 1), ("top_k", 0), ("top_p", 1), ("min_p", 0),
    )}  # fmt: skip
    sampling = rows_of(len(FILTERS), **columns)
    expected = core.choose_tokens(logits, sampling)
    for name in IMPLEMENTATIONS:
        found = chosen(name, data, sampling, chunk_len=1024)
        np.testing.assert_array_equal(found, expected, err_msg=name)


@pytest.mark.parametrize("room", [2, 128])
@pytest.mark.parametrize(
    "filters", [{"top_k": 7}, {"top_p": 0.6}, {"top_k": 30, "top_p": 0.8}], ids=str
)
def test_borders_are_exact(filters: dict[str, Any], room: int) -> None:
    """The last token that is kept, with and without room for those in doubt, among equal ones."""
    logits = np.round(np.random.default_rng(11).normal(size=(1, 90)) * 2).astype(np.float32)
    sampling = rows_of(1, temperature=1.5, **filters)
    kept = np.flatnonzero(np.isfinite(core.process_logits(logits[0], sampling, 0)))
    tables = SamplingTables(1, 90, DEVICE)
    tables.refill(sampling)
    scratch = scratch_of(tables, room=room)
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    sampling_kernels.choose_tokens(torch.from_numpy(logits).to(DEVICE), tables, scratch, out)
    scaled = (logits[0] - logits.max()) / np.float32(1.5)
    ranks = (np.abs(scaled).view(np.int32).astype(np.int64) << 32) | np.arange(90)
    assert 1 < len(kept) < 60
    np.testing.assert_array_equal(np.flatnonzero(ranks <= scratch.thresholds.item()), kept)


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
def test_a_vocabulary_of_real_size(spread: float) -> None:
    random = np.random.default_rng(2)
    logits = (random.normal(size=(64, 128_256)) * spread).astype(np.float32)
    sampling = random_rows(random, 64, 128_256)
    found = chosen("triton", logits, sampling, chunk_len=4096, room=4096)
    np.testing.assert_array_equal(found, core.choose_tokens(logits, sampling))


def test_one_size_of_tables_serves_unlike_steps_at_the_same_addresses() -> None:
    random = np.random.default_rng(4)
    tables = SamplingTables(4, 300, DEVICE)
    addresses = [tables.keys.data_ptr(), tables.top_k.data_ptr(), tables.floors.data_ptr()]
    for num_rows in (4, 1):
        logits = random.normal(size=(4, 300)).astype(np.float32)
        sampling = random_rows(random, num_rows, 300)
        tables.refill(sampling)
        found = run(torch.from_numpy(logits).to(DEVICE), tables)
        expected = core.choose_tokens(logits[:num_rows], sampling)
        np.testing.assert_array_equal(found[:num_rows], expected)
        assert (found[num_rows:] == -7).all()
    assert addresses == [t.data_ptr() for t in (tables.keys, tables.top_k, tables.floors)]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_masked_logits_are_never_chosen(name: str) -> None:
    logits = np.full((6, 600), -np.inf, dtype=np.float32)
    logits[:, 400] = 1
    logits[:3, [17, 300]] = 0.5
    sampling = rows_of(6, temperature=[0, 1, 100] * 2, top_k=[0, 5, 0] * 2, top_p=[1, 1, 0.9] * 2)
    expected = core.choose_tokens(logits, sampling)
    np.testing.assert_array_equal(chosen(name, logits, sampling), expected)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_logits_may_be_a_view(name: str) -> None:
    wide = torch.full((3, 900), torch.nan, device=DEVICE)
    logits = np.random.default_rng(6).normal(size=(3, 500)).astype(np.float32)
    wide[:, 100:600] = torch.from_numpy(logits)
    sampling = rows_of(3, temperature=[0, 1, 0.5], top_p=[1, 1, 0.7])
    found = chosen(name, wide[:, 100:600], sampling)
    np.testing.assert_array_equal(found, core.choose_tokens(logits, sampling))


def test_a_step_of_no_rows() -> None:
    empty = np.empty((0, 50), dtype=np.float32)
    assert len(chosen("triton", empty, rows_of(0))) == 0


def test_the_winner_needs_exact_noise_only_where_it_is_close() -> None:
    """Two tokens whose sums differ by one float32 step: the screen alone could not tell."""
    seeds = np.arange(6)
    drawn = core.gumbel(seeds[:, None], np.array(5), np.arange(2))
    logits = np.stack((np.zeros(6, dtype=np.float32), drawn[:, 0] - drawn[:, 1]), axis=1)
    sampling = rows_of(6, seed=seeds)
    expected = core.choose_tokens(logits, sampling)
    np.testing.assert_array_equal(chosen("triton", logits, sampling), expected)


def test_floors_keep_what_float64_keeps() -> None:
    min_p = np.random.default_rng(7).uniform(0, 1, 500).astype(np.float32)
    exact = np.log(min_p.astype(np.float64))
    floors = least_kept(min_p)
    assert (floors >= exact).all()
    assert (np.nextafter(floors, np.float32(-np.inf)) < exact).all()
    assert least_kept(np.zeros(1, dtype=np.float32)).tolist() == [-np.inf]


def test_kernels_choose_rows_without_a_typical_p() -> None:
    assert takes(rows_of(2))
    assert not takes(rows_of(2, typical_p=[1, 0.9]))


def test_tables_take_no_typical_p() -> None:
    sampling = replace(rows_of(1), typical_p=np.array([0.5], dtype=np.float32))
    with pytest.raises(AssertionError):
        SamplingTables(1, 9, DEVICE).refill(sampling)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.01}])
def test_rows_that_are_not_finite_have_no_token(name: str, filters: dict[str, float]) -> None:
    """NaN or infinity anywhere, or minus infinity throughout; in any part of the vocabulary."""
    whole = np.random.default_rng(5).normal(size=(8, 600)).astype(np.float32)
    whole[6, :599] = -np.inf
    logits, sound = whole.copy(), np.array([0, 6, 7])
    logits[1, 7], logits[2, 599], logits[3], logits[4, 300] = np.nan, np.nan, np.nan, np.inf
    logits[5] = -np.inf
    for temperature in (0.0, 0.8):
        sampling = rows_of(8, temperature=temperature, **filters)
        # Devices do not mind; where kernels are interpreted, numpy warns.
        with np.errstate(all="ignore"):
            found = chosen(name, logits, sampling)
        assert (found[1:6] == -1).all()
        assert np.array_equal(found[sound], core.choose_tokens(whole, sampling)[sound])
