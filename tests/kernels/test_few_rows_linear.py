"""Products of few rows: right, with their gates, whatever the tiles."""

from __future__ import annotations

import inspect

import pytest
import torch
from draftline.kernels.dispatch import load_few_rows_linear
from draftline.kernels.linear.few_rows import tile_bytes, tile_sizes
from draftline.kernels.shared_kernels import num_stages, stages_within
from support.fakes.products_in_order import use_products_in_order
from support.inputs.attention import DEVICE
from torch.nn.functional import gelu, silu

# Of a result, and of the largest result, in whose size sums are rounded.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TRITON = load_few_rows_linear("triton")


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def exact(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    wide = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    if activation is None:
        return wide
    left, right = wide.chunk(2, -1)
    return (silu(left) if activation == "silu" else gelu(left, approximate="tanh")) * right


@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs"),
    [(0, 8, 16), (1, 1, 2), (1, 300, 70), (5, 512, 34), (17, 129, 48), (64, 64, 10)],
)
@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_equals_float64(
    name: str, activation: str | None, dtype: torch.dtype, num_rows: int, num_inputs: int,
    num_outputs: int,
) -> None:  # fmt: skip
    # Rows that do not lie one behind the other.
    x = numbers(num_rows, num_inputs + 3, seed=1, dtype=dtype)[:, :num_inputs]
    weight = numbers(num_outputs, num_inputs, seed=2, dtype=dtype)
    for bias, out_dtype in ((None, None), (numbers(num_outputs, seed=3, dtype=dtype), dtype)):
        expected = exact(x, weight, bias, activation)
        found = load_few_rows_linear(name)(
            x, weight, bias, activation=activation, out_dtype=out_dtype
        )
        assert found.dtype == dtype
        assert found.shape == expected.shape
        if num_rows:
            error = (found.double() - expected).abs()
            assert (error <= BOUNDS[dtype] * (expected.abs() + 0.2 * expected.abs().max())).all()


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_sums_are_handed_on_in_float32(name: str) -> None:
    """Two outputs that bfloat16 does not tell apart."""
    x = torch.ones(1, 16, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.zeros(2, 16, dtype=torch.bfloat16, device=DEVICE)
    weight[:, 0] = 1.0
    weight[1, 1] = 2.0**-12
    found = load_few_rows_linear(name)(x, weight, out_dtype=torch.float32)
    assert found.tolist() == [[1.0, 1.0 + 2.0**-12]]


@pytest.mark.parametrize("most", [16, 32, 64])
def test_a_row_is_alike_among_as_many_others_as_its_tile_holds(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_products_in_order(monkeypatch)
    weight, x = numbers(48, 300, seed=2), numbers(most, 300, seed=1)
    among = TRITON(x, weight, activation="silu")
    least = most // 2 + 1 if most > 16 else 1
    for first in (0, most - least):
        rows = slice(first, first + least)
        assert torch.equal(TRITON(x[rows].clone(), weight, activation="silu"), among[rows])


def test_tiles_grow_with_rows() -> None:
    sizes = [tuple(tile_sizes(rows, torch.bfloat16).values()) for rows in (1, 17, 64)]
    assert sizes == [(16, 64, 128), (32, 64, 128), (64, 64, 128)]
    assert tile_sizes(64, torch.float32) == {"ROWS": 64, "OUTPUTS": 64, "INPUTS": 32}
    assert tile_bytes(tile_sizes(64, torch.bfloat16), torch.bfloat16, is_gated=True) == 49_152


def test_as_many_tiles_are_on_their_way_as_there_is_room_for() -> None:
    """On an H200; and on an L40S, where tensor cores take one tile from registers."""
    small, large = 20_480, 49_152
    hopper, ada = (232_448, (9, 0)), (101_376, (8, 9))
    assert [stages_within(6, size, *hopper) for size in (small, large)] == [6, 4]
    assert [stages_within(6, size, *ada) for size in (small, large)] == [5, 3]
    # Programs that share a multiprocessor leave room for the next kernel's.
    counts = [
        num_stages(torch.device("cpu"), programs, small, is_gated=is_gated)
        for programs, is_gated in ((64, False), (64, True), (2004, False), (224, True))
    ]
    assert counts == [6, 6, 3, 4]


def test_both_have_one_signature() -> None:
    theirs = load_few_rows_linear("reference")
    assert inspect.signature(TRITON) == inspect.signature(theirs)
