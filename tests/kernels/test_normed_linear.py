"""Norms of slices and their projection in one launch: right, whatever the tiles."""

from __future__ import annotations

import inspect

import pytest
import torch
from draftline.kernels.dispatch import load_normed_linear
from draftline.kernels.linear.reference import MOST_FEW_ROWS
from support.fakes.products_in_order import use_products_in_order
from support.inputs.attention import DEVICE

# Of a result, and of the largest result, in whose size sums are rounded.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-5
TRITON = load_normed_linear("triton")


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def exact(x: torch.Tensor, weight: torch.Tensor, num_norms: int) -> torch.Tensor:
    slices = x.double().unflatten(-1, (num_norms, -1))
    normed = slices * torch.rsqrt(slices.square().mean(-1, keepdim=True) + EPS)
    return normed.flatten(-2) @ weight.double().t()


@pytest.mark.parametrize(
    ("num_rows", "num_norms", "size", "num_outputs"),
    [
        (0, 4, 8, 16),
        (1, 4, 1, 1),
        (1, 4, 300, 70),
        (5, 4, 128, 33),
        (17, 3, 129, 48),
        (MOST_FEW_ROWS, 1, 64, 9),
        (MOST_FEW_ROWS + 1, 4, 40, 9),
    ],
)
@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_equals_float64(
    name: str, dtype: torch.dtype, num_rows: int, num_norms: int, size: int, num_outputs: int
) -> None:
    num_inputs = num_norms * size
    # Rows that do not lie one behind the other, and slices of very different sizes.
    x = numbers(num_rows, num_inputs + 3, seed=1, dtype=dtype)[:, :num_inputs]
    x[:, :size] *= 1000.0
    x[:, size : 2 * size] *= 1e-3
    weight = numbers(num_outputs, num_inputs, seed=2, dtype=dtype)
    found = load_normed_linear(name)(x, weight, num_norms, EPS)
    expected = exact(x, weight, num_norms)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    if num_rows:
        error = (found.double() - expected).abs()
        assert (error <= BOUNDS[dtype] * (expected.abs() + 0.2 * expected.abs().max())).all()


def test_squares_of_large_halves_are_finite() -> None:
    """Residual streams have numbers whose squares float16 does not hold."""
    x = torch.full((1, 64), 60_000.0, dtype=torch.float16, device=DEVICE)
    weight = torch.ones(1, 64, dtype=torch.float16, device=DEVICE)
    assert TRITON(x, weight, 4, EPS).item() == pytest.approx(64.0, rel=1e-3)


def test_rows_of_zeros_stay_zeros() -> None:
    x = torch.zeros(2, 32, device=DEVICE)
    assert not TRITON(x, numbers(8, 32, seed=2), 4, EPS).any()


@pytest.mark.parametrize("most", [16, MOST_FEW_ROWS])
def test_a_row_is_alike_among_as_many_others_as_its_tile_holds(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_products_in_order(monkeypatch)
    weight, x = numbers(48, 400, seed=2), numbers(most, 400, seed=1)
    among = TRITON(x, weight, 4, EPS)
    least = most // 2 + 1 if most > 16 else 1
    for first in (0, most - least):
        rows = slice(first, first + least)
        assert torch.equal(TRITON(x[rows].clone(), weight, 4, EPS), among[rows])


def test_both_have_one_signature() -> None:
    theirs = load_normed_linear("reference")
    assert inspect.signature(TRITON) == inspect.signature(theirs)
