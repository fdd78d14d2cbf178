"""Products with quantised weights: widened ones have, bit by bit, the sums of their float32 values;
those by dot products of bytes are no less exact."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from draftline.kernels.cpu.build import Vectors, vectors
from draftline.kernels.cpu.packed_linear import (
    PackedWeight,
    pack_quantized,
    pack_weights,
    packed_linear,
)
from draftline.models.load.quantized_layouts import QuantizedWeight
from support.inputs.random_weights import quantized
from support.tools.cpu_kernels import load_cpu_kernels
from torch import Tensor

pytestmark = pytest.mark.compiler

# The last has more inputs than one pass over a panel takes.
SIZES = [(8, 5), (160, 64), (200, 130), (1100, 70)]
KEPT = {
    "int8": torch.int8, "int8 with zero points": torch.uint8, "uint8": torch.uint8,
    "4 bits": torch.uint8, "4 bits with minima": torch.uint8, "e4m3": torch.float8_e4m3fn,
    "int8 with minima": torch.int8, "e2m1": torch.float4_e2m1fn_x2,
}  # fmt: skip
GROUPS = ["32", "128", "one", "scattered"]
# The kernels have both forms on every processor; which one is packed is chosen by speed.
WIDENED = vectors().widening
BY_DOTS = replace(vectors(), has_byte_dots=True)
DOTS = [kind for kind in KEPT if kind != "e4m3"]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    load_cpu_kernels()


def packed(weight: QuantizedWeight, form: Vectors = WIDENED) -> PackedWeight:
    found = pack_quantized(
        weight.codes, weight.scales, weight.zeros, weight.group_of, form, weight.minima
    )
    assert found is not None
    return found


def widened(weight: QuantizedWeight) -> PackedWeight:
    return pack_weights([weight.dequantized(torch.float32).t()], vectors().panel)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("kind", KEPT)
def test_sums_are_those_of_the_values_bit_by_bit(kind: str, groups: str) -> None:
    torch.manual_seed(0)
    for inputs, outputs in SIZES:
        weight = quantized(kind, groups, inputs, outputs)
        small, wide = packed(weight), widened(weight)
        assert small.codes.dtype == KEPT[kind]
        for rows in (0, 1, 2, 3, 4, 5, 6, 13, 40):
            x = torch.randn(rows, inputs)
            assert torch.equal(packed_linear(x, small, outputs), packed_linear(x, wide, outputs))


def values_of(weight: QuantizedWeight) -> Tensor:
    """float64 [inputs, outputs]"""
    zeros, minima = (
        0 if one is None else one.double()[:, weight.group_of]
        for one in (weight.zeros, weight.minima)
    )
    scales = weight.scales.double()[:, weight.group_of]
    return ((weight.codes.double() - zeros) * scales + minima).t()


def rows_of(kind: str, inputs: int) -> Tensor:
    x = torch.randn(7, inputs)
    match kind:
        case "equal":
            return torch.full_like(x, 1 + 2**-23)
        case "just below a power of two":
            return x.sign() * (2 - 2**-23)
        case "one large of 32":
            x[:, 5::32] *= 1000
        case "of all sizes":
            x *= torch.exp2(torch.randint(-30, 30, (inputs,)))
        case "tiny":
            x *= 2.0**-90
        case "huge":
            x *= 2.0**100
    return x


# The error beside that of float32 sums.
MOST_OF_FLOAT32 = {
    "normal": 0.8, "equal": 0.8, "just below a power of two": 0.8, "tiny": 0.8, "huge": 0.8,
    "one large of 32": 1.5, "of all sizes": 1.5,
}  # fmt: skip


@pytest.mark.parametrize("inputs_are", MOST_OF_FLOAT32)
@pytest.mark.parametrize("groups", GROUPS[:3])
@pytest.mark.parametrize("kind", DOTS)
def test_dots_of_bytes_are_as_exact_as_float32(kind: str, groups: str, inputs_are: str) -> None:
    torch.manual_seed(2)
    weight, x = quantized(kind, groups, 600, 130), rows_of(inputs_are, 600)
    small, exact = packed(weight, BY_DOTS), x.double() @ values_of(weight)
    assert small.codes.dim() > packed(weight).codes.dim()
    found, wide = packed_linear(x, small, 130), packed_linear(x, packed(weight), 130)
    assert (found - exact).norm() < MOST_OF_FLOAT32[inputs_are] * (wide - exact).norm()


@pytest.mark.parametrize("kind", ["4 bits", "int8"])
def test_dots_of_bytes_round_a_chunk_to_24_bits(kind: str) -> None:
    weight = quantized(kind, "32", 96, 40)
    x = torch.randn(3, 96)
    x[:, 40] = 2.0**20
    errors = (packed_linear(x, packed(weight, BY_DOTS), 40) - x.double() @ values_of(weight)).abs()
    # Of the inputs beside the large one, even where its own weight is 0.
    assert (errors <= 2.0**20 * 2**-22 * values_of(weight)[32:64].abs().sum(0) * 1.1).all()


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_rows_that_are_not_finite_stay_so_alone(wrong: float) -> None:
    weight = packed(quantized("4 bits with minima", "32", 160, 40), BY_DOTS)
    x = torch.randn(3, 160)
    expected = packed_linear(x, weight, 40)
    x[1, 70] = wrong
    found = packed_linear(x, weight, 40)
    assert found[1].isnan().all()
    assert torch.equal(found[::2], expected[::2])


def test_rows_of_zeros_give_zeros() -> None:
    for kind in DOTS:
        weight = packed(quantized(kind, "32", 70, 40), BY_DOTS)
        assert not packed_linear(torch.zeros(2, 70), weight, 40).any()


def test_4_bits_take_half_a_byte() -> None:
    panel = vectors().panel
    for form in (WIDENED, BY_DOTS):
        small = packed(quantized("4 bits", "one", 320, 2 * panel), form)
        assert small.codes.nbytes == 320 * panel
        assert small.kind == "uint4"
        large = packed(quantized("uint8", "one", 320, panel), form)
        assert large.codes.nbytes == 320 * panel
        assert large.kind == "int8"
        floats = packed(quantized("e2m1", "one", 320, 2 * panel), form)
        assert floats.codes.nbytes == 320 * panel
        assert floats.kind == "float4_e2m1fn_x2"


def test_scales_of_16_bits_stay_in_16_bits() -> None:
    weight = quantized("4 bits with minima", "32", 64, 70)
    assert packed(weight, BY_DOTS).scales.dtype == torch.float32
    assert weight.minima is not None
    halves = replace(weight, minima=weight.minima.half().float())
    small = packed(halves, BY_DOTS)
    assert small.scales.dtype == small.minima.dtype == torch.float16
    x = torch.randn(2, 64)
    in_float = small._replace(scales=small.scales.float(), minima=small.minima.float())
    assert torch.equal(packed_linear(x, small, 70), packed_linear(x, in_float, 70))


@pytest.mark.parametrize("form", [WIDENED, BY_DOTS])
@pytest.mark.parametrize("kind", ["e2m1", "int8"])
def test_scales_that_are_powers_of_two_stay_in_8_bits(kind: str, form: Vectors) -> None:
    weight = quantized(kind, "32", 160, 70)
    weight = replace(weight, scales=torch.exp2(weight.scales.abs().log2().round()))
    small = packed(weight, form)
    assert small.scales.dtype == torch.float8_e8m0fnu
    x = torch.randn(2, 160)
    in_float = small._replace(scales=small.scales.float())
    found = packed_linear(x, small, 70)
    assert torch.equal(found, packed_linear(x, in_float, 70))
    torch.testing.assert_close(found, packed_linear(x, widened(weight), 70))
    for other in (3.0, 2.0**-130, 0.0, -2.0):
        weight.scales[3, 1] = other
        assert packed(weight, form).scales.dtype != torch.float8_e8m0fnu


def test_zero_points_in_the_middle_are_not_stored() -> None:
    for kind, zero in (("4 bits", 8), ("uint8", 128), ("4 bits", 7)):
        weight = quantized(kind, "32", 64, 70)
        middle = replace(weight, zeros=torch.full_like(weight.scales, zero))
        assert (packed(middle, BY_DOTS).zeros.numel() > 0) == (zero == 7)


@pytest.mark.parametrize("form", [WIDENED, BY_DOTS])
@pytest.mark.parametrize("kind", KEPT)
def test_neither_company_nor_threads_change_a_row(kind: str, form: Vectors) -> None:
    torch.manual_seed(1)
    weight, x = packed(quantized(kind, "32", 600, 1000), form), torch.randn(70, 600)
    together = packed_linear(x, weight, 1000)
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            assert torch.equal(packed_linear(x, weight, 1000), together)
            for rows in (1, 4, 6):
                parts = [packed_linear(part, weight, 1000) for part in x.split(rows)]
                assert torch.equal(torch.cat(parts), together)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("codes", "scale", "zero"),
    [
        (torch.ones(4, 8).to(torch.float8_e5m2), 1.0, None),
        (torch.ones(4, 8).to(torch.float8_e4m3fn), 1.0, 1.0),
        (torch.full((4, 8), 1.125).to(torch.float8_e4m3fn), 129.0, None),
        (torch.ones(4, 8, dtype=torch.uint8), 1.0, 0.5),
        (torch.ones(4, 8, dtype=torch.uint8), 1.0, 300.0),
        (torch.ones(4, 8, dtype=torch.int8), 1.0, 200.0),
    ],
)
@pytest.mark.parametrize("form", [WIDENED, BY_DOTS])
def test_numbers_that_the_kernels_do_not_know_are_not_packed(
    codes: Tensor, scale: float, zero: float | None, form: Vectors
) -> None:
    zeros = None if zero is None else torch.full((4, 1), zero)
    groups = torch.zeros(8, dtype=torch.int64)
    assert pack_quantized(codes, torch.full((4, 1), scale), zeros, groups, form) is None


@pytest.mark.parametrize("codes", [torch.uint8, torch.int8])
def test_minima_beside_scales_of_24_bits_are_not_packed(codes: torch.dtype) -> None:
    ones, groups = torch.ones(4, 8, dtype=codes), torch.zeros(8, dtype=torch.int64)
    minima = torch.ones(4, 1)
    for scale, is_packed in ((0.1, False), (17 / 512, True)):
        scales = torch.full((4, 1), scale)
        assert (
            pack_quantized(ones, scales, None, groups, WIDENED, minima) is not None
        ) == is_packed


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    for form in (WIDENED, BY_DOTS):
        weight = packed(quantized("4 bits", "32", 64, 70), form)
        for wrong in (
            weight._replace(scales=weight.scales[:1]),
            weight._replace(zeros=weight.zeros[:, :1]),
            weight._replace(groups=weight.groups[:1]),
            weight._replace(codes=weight.codes[:1]),
            weight._replace(scales=weight.scales.double()),
        ):
            with pytest.raises(RuntimeError):
                packed_linear(torch.randn(2, 64), wrong, 70)
