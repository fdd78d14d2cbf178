"""Writes, moves and block copies of a KV cache: Triton against the torch reference, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from draftline.kernels.dispatch import load_ops
from draftline.kernels.kv.reference import LARGEST_FP8, row_scales
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inputs.attention import DEVICE, FP8

DTYPES = [torch.float32, torch.float16, torch.bfloat16, FP8]


def cache(
    dtype: torch.dtype, layers: int = 2, slots: int = 12, heads: int = 3, dim: int = 10
) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(layers, slots, 2, heads, dim, device=DEVICE).to(dtype)


def bits(data: torch.Tensor) -> np.ndarray:
    return data.contiguous().view(torch.uint8).cpu().numpy()


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_write(name: str, stored: torch.dtype) -> None:
    data = cache(stored)
    before = data.clone()
    slots = torch.tensor([7, -1, 0, 11], dtype=torch.int32, device=DEVICE)
    wide = torch.randn(4, 8, 10, device=DEVICE).to(stored)
    if stored == FP8:
        # Numbers that FP8 holds: Triton's interpreter loses the carry when it rounds.
        wide = wide.to(torch.bfloat16)
    keys, values = wide[:, 1:4], wide[:, 4:7]
    load_ops(name).write_kv(keys, values, data[1], slots)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected = torch.stack((keys[row], values[row])).to(stored)
            np.testing.assert_array_equal(bits(data[1, slot]), bits(expected))
    untouched = [slot for slot in range(12) if slot not in (7, 0, 11)]
    np.testing.assert_array_equal(bits(data[1, untouched]), bits(before[1, untouched]))
    np.testing.assert_array_equal(bits(data[0]), bits(before[0]))


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_latents_have_one_side(name: str) -> None:
    data = cache(torch.bfloat16, heads=1)[:, :, :1].contiguous()
    before = data.clone()
    slots = torch.tensor([7, -1, 0], dtype=torch.int32, device=DEVICE)
    rows = torch.randn(3, 1, 10, device=DEVICE).bfloat16()
    load_ops(name).write_kv(rows, rows, data[1], slots)
    before[1, [7, 0], 0] = rows[[0, 2]]
    np.testing.assert_array_equal(bits(data), bits(before))


@pytest.mark.gpu
def test_fp8_is_rounded_as_torch_does() -> None:
    ours, theirs = cache(FP8), cache(FP8)
    keys, values = torch.randn(2, 12, 3, 10, device=DEVICE) * 50
    slots = torch.arange(12, dtype=torch.int32, device=DEVICE)
    load_ops("triton").write_kv(keys, values, ours[0], slots)
    load_ops("reference").write_kv(keys, values, theirs[0], slots)
    np.testing.assert_array_equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_fp8_is_scaled_by_head_and_cut(name: str) -> None:
    data = cache(FP8, layers=1)
    scales = torch.tensor([[0.5, 1.0, 2.0], [4.0, 0.25, 1.0]], device=DEVICE)
    keys = torch.full((1, 3, 10), 8.0, device=DEVICE)
    values = torch.full((1, 3, 10), -1000.0, device=DEVICE)
    slots = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    load_ops(name).write_kv(keys, values, data[0], slots, scales)
    assert data[0, 5, 0, :, 0].float().tolist() == [16.0, 8.0, 4.0]
    # -250 is no number of e4m3; the others are beyond its largest.
    assert data[0, 5, 1, :, 0].float().tolist() == [-256.0, -448.0, -448.0]


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_fp8_may_have_a_scale_for_every_row(name: str) -> None:
    """A power of two: numbers far from 1, which e4m3 alone would lose, come back as they were."""
    data, scales = cache(FP8, layers=1), torch.ones(12, 2, 3, device=DEVICE)
    whole = torch.tensor([448.0, 1, -3, 0.5, 32, -16, 0, 7, 14, 28], device=DEVICE)
    sizes = torch.tensor([[2.0**-30, 2.0**20, 1.0], [2.0**40, 2.0**-9, 4.0]], device=DEVICE)
    keys, values = (sizes[:, None, :, None] * whole).unbind(0)
    slots = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    load_ops(name).write_kv(keys, values, data[0], slots, scales)
    assert torch.equal(scales[5], sizes)
    back = data[0, 5].float() * scales[5][..., None]
    assert torch.equal(back, torch.cat((keys, values)))
    assert (scales[[0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]] == 1).all()


def test_row_scales_are_the_least_powers_of_two_that_fit() -> None:
    largest = torch.tensor([0.0, 1e-44, 2.0**-118, 1.0, 1.75, 1.7500001, 448.0, 448.1, 3e38])
    scales = row_scales(largest)
    mantissas, _ = torch.frexp(scales)
    assert (mantissas == 0.5).all()
    assert (largest / scales <= LARGEST_FP8).all()
    assert (largest[3:] / scales[3:] > LARGEST_FP8 / 2).all()


@settings(max_examples=15)
@given(
    moves=st.lists(st.integers(-1, 11), min_size=1, max_size=8).flatmap(
        lambda sources: st.tuples(
            st.just(sources),
            st.lists(st.integers(0, 11), min_size=len(sources), max_size=len(sources), unique=True),
        )
    ),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(["reference", "triton"]),
    is_apart=st.booleans(),
)
def test_moves_read_all_before_they_write(
    moves: tuple[list[int], list[int]], dtype: torch.dtype, name: str, *, is_apart: bool
) -> None:
    data = cache(dtype)
    if is_apart:
        # As a large cache on a CPU.
        data = torch.cat([data, data], dim=1)[:, : data.shape[1]]
    expected = bits(data).copy()
    real = [pair for pair in zip(*moves, strict=True) if pair[0] >= 0]
    for source, target in real:
        expected[:, target] = bits(data)[:, source]
    load_ops(name).move_kv(data, torch.tensor(moves, device=DEVICE).T)
    np.testing.assert_array_equal(bits(data), expected)
