"""Products in one order of additions: right, and a row's bits alike among any others."""

from __future__ import annotations

import inspect

import pytest
import torch
from draftline.kernels.dispatch import load_invariant_linear
from draftline.kernels.linear.product import tile_sizes
from support.fakes.products_in_order import use_products_in_order
from support.inputs.attention import DEVICE

# Of a result, and of the largest result, in whose size sums are rounded.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TRITON = load_invariant_linear("triton")


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs"),
    [(0, 8, 16), (1, 1, 1), (1, 300, 70), (5, 128, 33), (65, 129, 48), (130, 64, 9)],
)
@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_equals_float64(
    name: str, dtype: torch.dtype, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    # Rows that do not lie one behind the other.
    x = numbers(num_rows, num_inputs + 3, seed=1, dtype=dtype)[:, :num_inputs]
    weight = numbers(num_inputs, num_outputs, seed=2, dtype=dtype)
    for bias in (None, numbers(num_outputs, seed=3, dtype=dtype)):
        exact = x.double() @ weight.double() + (0 if bias is None else bias.double())
        for layout in (weight, weight.t().contiguous().t()):
            found = load_invariant_linear(name)(x, layout, bias)
            assert found.dtype == dtype
            assert found.shape == (num_rows, num_outputs)
            if num_rows:
                error = (found.double() - exact).abs()
                assert (error <= BOUNDS[dtype] * (exact.abs() + 0.2 * exact.abs().max())).all()


@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_a_row_is_alike_among_any_others(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_products_in_order(monkeypatch)
    weight, bias = (numbers(*shape, seed=2, dtype=dtype) for shape in ((300, 48), (48,)))
    x = numbers(100, 300, seed=1, dtype=dtype)
    among = TRITON(x, weight, bias)
    for count in (1, 7, 64):
        for first in (0, 13, 100 - count):
            rows = slice(first, first + count)
            assert torch.equal(TRITON(x[rows].clone(), weight, bias), among[rows])
    backwards = TRITON(x.flip(0), weight, bias).flip(0)
    assert torch.equal(backwards, among)


def test_weights_of_few_outputs_have_more_programs() -> None:
    sizes = [tile_sizes(count, torch.bfloat16)["OUTPUTS"] for count in (128_256, 6144, 4096, 1024)]
    assert sizes == [64, 64, 64, 16]


def test_both_have_one_signature() -> None:
    theirs = load_invariant_linear("reference")
    assert inspect.signature(TRITON) == inspect.signature(theirs)
