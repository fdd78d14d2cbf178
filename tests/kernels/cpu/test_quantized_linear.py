"""Products with quantised weights have, bit by bit, the sums of their float32 values."""

from __future__ import annotations

import pytest
import torch
from draftline.kernels.cpu.build import vectors
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


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    load_cpu_kernels()


def packed(weight: QuantizedWeight) -> PackedWeight:
    found = pack_quantized(
        weight.codes, weight.scales, weight.zeros, weight.group_of, vectors().panel, weight.minima
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


def test_4_bits_take_half_a_byte() -> None:
    panel = vectors().panel
    for codes, kind in (("4 bits", "uint4"), ("e2m1", "float4_e2m1fn_x2")):
        small = packed(quantized(codes, "one", 300, 2 * panel))
        assert small.codes.nbytes == 300 * panel
        assert small.kind == kind
    assert packed(quantized("uint8", "one", 300, panel)).codes.nbytes == 300 * panel


@pytest.mark.parametrize("kind", KEPT)
def test_neither_company_nor_threads_change_a_row(kind: str) -> None:
    torch.manual_seed(1)
    weight, x = packed(quantized(kind, "32", 600, 1000)), torch.randn(13, 600)
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
def test_numbers_that_the_kernels_do_not_know_are_not_packed(
    codes: Tensor, scale: float, zero: float | None
) -> None:
    zeros = None if zero is None else torch.full((4, 1), zero)
    groups = torch.zeros(8, dtype=torch.int64)
    assert pack_quantized(codes, torch.full((4, 1), scale), zeros, groups, 64) is None


@pytest.mark.parametrize("codes", [torch.uint8, torch.int8])
def test_minima_beside_scales_of_24_bits_are_not_packed(codes: torch.dtype) -> None:
    ones, groups = torch.ones(4, 8, dtype=codes), torch.zeros(8, dtype=torch.int64)
    minima = torch.ones(4, 1)
    for scale, is_packed in ((0.1, False), (17 / 512, True)):
        scales = torch.full((4, 1), scale)
        assert (pack_quantized(ones, scales, None, groups, 64, minima) is not None) == is_packed


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    weight = packed(quantized("4 bits", "32", 64, 70))
    for wrong in (
        weight._replace(scales=weight.scales[:1]),
        weight._replace(zeros=weight.zeros[:, :1]),
        weight._replace(groups=weight.groups[:9]),
    ):
        with pytest.raises(RuntimeError):
            packed_linear(torch.randn(2, 64), wrong, 70)
