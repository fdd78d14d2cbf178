"""Products with quantised weights: Triton and its torch reference against their values."""

from __future__ import annotations

import inspect

import pytest
import torch
from draftline.kernels.dispatch import load_quantized_linear
from draftline.kernels.quantized import quantized_kernels
from draftline.kernels.quantized.kept_weight import KeptWeight, are_alike, joined, keep_weight
from draftline.kernels.quantized.reference import MOST_QUANTIZED_ROWS
from draftline.kernels.small_codes import E2M1_NUMBERS
from draftline.models.load.quantized_layouts import QuantizedWeight, groups_in_order
from support.fakes.products_in_order import use_products_in_order
from support.inputs.attention import DEVICE
from torch import Tensor
from torch.nn.functional import gelu, silu

# Of a result, and of the largest result, in whose size sums are rounded.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# How weights come, and the codes that are kept of them.
KINDS = {
    "int8": "uint8", "int8 with zero points": "uint8", "uint8": "uint8",
    "uint8, symmetric": "uint8", "4 bits": "uint4", "4 bits, symmetric": "uint4",
    "4 bits with minima": "uint4", "e4m3": "e4m3", "e2m1": "e2m1",
}  # fmt: skip
GROUPS = {"one": None, "16": 16, "32": 32, "128": 128, "scattered": 32}


def codes_of(kind: str, outputs: int, inputs: int, random: torch.Generator) -> Tensor:
    if kind == "e2m1":
        numbers = torch.randint(16, (outputs, inputs), generator=random)
        return E2M1_NUMBERS[numbers].to(torch.float8_e4m3fn)
    if kind == "e4m3":
        every = torch.arange(256, dtype=torch.uint8)
        finite = every[every.view(torch.float8_e4m3fn).float().isfinite()]
        chosen = torch.randint(len(finite), (outputs, inputs), generator=random)
        return finite[chosen].view(torch.float8_e4m3fn)
    least, most = (-128, 128) if kind.startswith("int8") else (0, 256)
    dtype = torch.int8 if least else torch.uint8
    if kind.startswith("4 bits"):
        most = 16
    return torch.randint(least, most, (outputs, inputs), generator=random).to(dtype)


def quantized(kind: str, groups: str, outputs: int, inputs: int) -> QuantizedWeight:
    random = torch.Generator().manual_seed(outputs + inputs)
    codes = codes_of(kind, outputs, inputs, random)
    group_of = groups_in_order(inputs, GROUPS[groups] or inputs, codes)
    num_groups = int(group_of.max()) + 1
    if groups == "scattered":
        group_of = group_of[torch.randperm(inputs, generator=random)]
    scales = torch.randn(outputs, num_groups, generator=random) / 100
    zeros, minima = None, None
    if "symmetric" in kind:
        zeros = torch.full_like(scales, 8 if kind.startswith("4") else 128)
    elif kind == "4 bits with minima":
        minima = torch.randn(outputs, num_groups, generator=random) / 10
    elif kind not in ("int8", "e4m3", "e2m1"):
        zeros = torch.randint(16, (outputs, num_groups), generator=random).float()
    return QuantizedWeight(codes, scales, zeros, group_of, minima)


def kept(weight: QuantizedWeight) -> KeptWeight:
    parts = weight.codes, weight.scales, weight.zeros, weight.group_of, weight.minima
    found = keep_weight(*(None if part is None else part.to(DEVICE) for part in parts))
    assert found is not None
    return found


def values_of(weight: QuantizedWeight, dtype: torch.dtype, name: str = "triton") -> Tensor:
    """The factors of a product by `name`, [outputs, inputs]."""
    if name == "triton" and dtype == torch.bfloat16 and DEVICE.type != "cuda":
        # Triton's interpreter cuts bfloat16 off in place of rounding.
        bits = weight.dequantized(torch.float32).view(torch.int32)
        return (bits & -0x10000).view(torch.float32).to(dtype)
    return weight.dequantized(dtype).to(DEVICE)


def rows_of(num_rows: int, num_inputs: int, dtype: torch.dtype) -> Tensor:
    """Rows that do not lie one behind the other."""
    wide = torch.randn(num_rows, num_inputs + 3, generator=torch.Generator().manual_seed(1))
    return wide.to(dtype).to(DEVICE)[:, :num_inputs]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_checkpoint_bit_by_bit(kind: str, groups: str) -> None:
    """Also in the kernels: of rows of which each takes one input, products are single values."""
    for inputs, outputs in ((16, 3), (100, 70), (300, 5)):
        weight = quantized(kind, groups, outputs, inputs)
        small = kept(weight)
        assert small.kind == KINDS[kind]
        assert small.shape == (outputs, inputs)
        for dtype in BOUNDS:
            assert torch.equal(small.dequantized(dtype), values_of(weight, dtype, "reference"))
            wanted = values_of(weight, dtype)
            wanted = wanted if small.order is None else wanted[:, small.order]
            assert torch.equal(quantized_kernels.widened(small, dtype), wanted)
        units = torch.eye(inputs, device=DEVICE)[:: 1 + inputs // 100]
        found = quantized_kernels.quantized_linear(units, small)
        assert torch.equal(found, units @ weight.dequantized(torch.float32).to(DEVICE).t())


@pytest.mark.parametrize("kind", ["e2m1", "e4m3", "4 bits", "int8"])
def test_scales_that_are_powers_of_two_take_8_bits(kind: str) -> None:
    weight = quantized(kind, "32", 70, 100)
    weight.scales.copy_(torch.exp2(weight.scales.abs().log2().round()))
    small = kept(weight)
    assert small.scales.dtype == torch.uint8
    values = weight.dequantized(torch.float32).to(DEVICE)
    assert torch.equal(small.dequantized(torch.float32), values)
    assert torch.equal(quantized_kernels.widened(small, torch.float32), values)
    units = torch.eye(100, device=DEVICE)
    assert torch.equal(quantized_kernels.quantized_linear(units, small), values.t())
    other = quantized(kind, "32", 7, 100)
    both = joined([small, kept(other)])
    values = torch.cat([values, other.dequantized(torch.float32).to(DEVICE)])
    assert torch.equal(both.dequantized(torch.float32), values)


@pytest.mark.parametrize(
    ("kind", "num_rows", "num_outputs", "num_inputs"),
    [
        ("4 bits", 0, 16, 8), ("int8", 1, 70, 300), ("4 bits", 1, 70, 300), ("e4m3", 5, 34, 256),
        ("4 bits with minima", 17, 48, 129), ("4 bits", 65, 40, 100), ("e2m1", 3, 70, 300),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_equals_float64(
    name: str, activation: str | None, dtype: torch.dtype, kind: str, num_rows: int,
    num_outputs: int, num_inputs: int,
) -> None:  # fmt: skip
    weight = quantized(kind, "one" if kind == "int8" else "32", num_outputs, num_inputs)
    x = rows_of(num_rows, num_inputs, dtype)
    bias = torch.randn(num_outputs, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    values = values_of(weight, dtype, name).double()
    for added in (None, bias):
        found = load_quantized_linear(name)(x, kept(weight), added, activation=activation)
        assert found.dtype == dtype
        assert found.shape == (num_rows, num_outputs // (1 if activation is None else 2))
        exact = x.double() @ values.T + (0 if added is None else added.double())
        if activation is not None:
            left, right = exact.chunk(2, -1)
            is_silu = activation == "silu"
            exact = (silu(left) if is_silu else gelu(left, approximate="tanh")) * right
        if num_rows:
            error = (found.double() - exact).abs()
            assert (error <= BOUNDS[dtype] * (exact.abs() + 0.2 * exact.abs().max())).all()


@pytest.mark.parametrize("kind", ["int8", "4 bits", "e4m3"])
def test_many_rows_and_wide_results(kind: str) -> None:
    weight = quantized(kind, "scattered", 40, 96)
    x = rows_of(MOST_QUANTIZED_ROWS + 1, 96, torch.float16)
    exact = x.double() @ weight.dequantized(torch.float16).to(DEVICE).double().T
    for name in ("reference", "triton"):
        product = load_quantized_linear(name)
        for count in (3, len(x)):
            found = product(x[:count], kept(weight), out_dtype=torch.float32)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), exact[:count], rtol=1e-5, atol=1e-4)
            rounded = product(x[:count], kept(weight))
            torch.testing.assert_close(rounded.double(), exact[:count], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["int8", "4 bits", "e4m3"])
def test_rows_of_fixed_tiles_are_alike_in_any_company(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type != "cuda":
        use_products_in_order(monkeypatch)
    weight = kept(quantized(kind, "32", 70, 160))
    x = rows_of(150, 160, torch.bfloat16)
    product = quantized_kernels.quantized_linear
    for activation in (None, "silu"):
        together = product(x, weight, activation=activation, row_tile=64)
        for first, last in ((0, 1), (3, 20), (60, 130), (149, 150)):
            part = product(x[first:last], weight, activation=activation, row_tile=64)
            assert torch.equal(part, together[first:last])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_side_by_side_and_rows_of_them(kind: str) -> None:
    weights = [quantized(kind, "32", outputs, 100) for outputs in (20, 7)]
    parts = [kept(one) for one in weights]
    assert are_alike(*parts)
    both = joined(parts)
    values = torch.cat([one.dequantized(torch.float32) for one in weights]).to(DEVICE)
    assert torch.equal(both.dequantized(torch.float32), values)
    rows = torch.tensor([21, 3, 3, 26], device=DEVICE)
    assert torch.equal(both.of_rows(rows).dequantized(torch.float32), values[rows])


def test_zero_points_of_one_weight_may_be_alike() -> None:
    parts = [kept(quantized(kind, "32", 6, 64)) for kind in ("4 bits", "4 bits, symmetric")]
    assert [part.offsets is None for part in parts] == [False, True]
    both = joined(parts)
    values = torch.cat([part.dequantized(torch.float32) for part in parts])
    assert torch.equal(both.dequantized(torch.float32), values)


def test_weights_that_differ_in_kind_are_not_alike() -> None:
    first = kept(quantized("4 bits", "32", 6, 64))
    for kind, groups in (
        ("int8", "32"), ("4 bits", "16"), ("4 bits", "scattered"), ("4 bits with minima", "32"),
    ):  # fmt: skip
        assert not are_alike(first, kept(quantized(kind, groups, 6, 64)))


def test_bytes_are_those_of_the_codes_and_steps() -> None:
    assert kept(quantized("4 bits, symmetric", "128", 64, 256)).num_bytes == 64 * (128 + 2 * 4)
    assert kept(quantized("4 bits", "128", 64, 256)).num_bytes == 64 * (128 + 2 * 8)
    for kind in ("int8", "e4m3"):
        assert kept(quantized(kind, "one", 64, 256)).num_bytes == 64 * (256 + 4)


@pytest.mark.parametrize(
    ("codes", "scale", "zero"),
    [
        (torch.ones(4, 8).to(torch.float8_e5m2), 1.0, None),
        (torch.ones(4, 8).to(torch.float8_e4m3fn), 1.0, 1.0),
        (torch.ones(4, 8).to(torch.float8_e4m3fn), 129.0, None),
        (torch.ones(4, 8, dtype=torch.uint8), 1.0, 0.5),
    ],
)
def test_numbers_that_the_kernels_do_not_know_are_not_kept(
    codes: Tensor, scale: float, zero: float | None
) -> None:
    zeros = None if zero is None else torch.full((4, 1), zero)
    groups = torch.zeros(8, dtype=torch.int64)
    assert keep_weight(codes, torch.full((4, 1), scale), zeros, groups) is None


@pytest.mark.parametrize("group_of", [[0] * 24 + [1] * 24, [0] * 16 + [1] * 32, [1] * 48])
def test_groups_that_the_kernels_do_not_know_are_not_kept(group_of: list[int]) -> None:
    codes = torch.ones(4, 48, dtype=torch.int8)
    assert keep_weight(codes, torch.ones(4, 2), None, torch.tensor(group_of)) is None


def test_both_have_one_signature() -> None:
    ours, theirs = (
        inspect.signature(load_quantized_linear(name)) for name in ("triton", "reference")
    )
    assert ours == theirs
