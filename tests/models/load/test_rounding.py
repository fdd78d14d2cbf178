"""Weights rounded as they load: how far they move, and what stays as it is."""

from __future__ import annotations

import pytest
import torch
from draftline.models.load.rounding import GROUP_SIZE, rounded

# Of a step, which the largest number of a group gives, half at most; of e4m3 a number's own.
STEPS = {"int8": 127, "int4": 15}
E4M3_BITS = 4


def weight(inputs: int) -> torch.Tensor:
    torch.manual_seed(0)
    scales = torch.tensor([1e-30, 1e-3, 0.1, 1, 10, 1e20])
    return torch.randn(6, inputs) * scales[:, None]


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("inputs", [5, 128, 300])
def test_numbers_move_by_half_a_step_of_their_own_group(kind: str, inputs: int) -> None:
    exact = weight(inputs)
    found = rounded(exact, kind)
    assert found.scales.shape == (6, -(-inputs // GROUP_SIZE))
    values = found.dequantized(torch.float32)
    for first in range(0, inputs, GROUP_SIZE):
        own, group = values[:, first : first + GROUP_SIZE], exact[:, first : first + GROUP_SIZE]
        moved = (own - group).abs()
        if kind == "fp8":
            most = group.abs() / 2**E4M3_BITS
            # The least numbers have fewer bits.
            most = most.clamp(min=1e-3 * group.abs().amax(dim=1, keepdim=True))
        else:
            least, largest = group.amin(dim=1).clamp(max=0), group.amax(dim=1).clamp(min=0)
            reach = torch.maximum(-least, largest) if kind == "int8" else largest - least
            # The zero point is rounded, too, which moves the ends.
            steps = 0.501 if kind == "int8" else 1.001
            most = (steps * reach / STEPS[kind])[:, None]
        assert (moved <= most).all()


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_zeros_stay_and_groups_do_not_matter_to_one_another(kind: str) -> None:
    exact = weight(256)
    exact[:, 3], exact[2] = 0, 0
    found = rounded(exact, kind).dequantized(torch.float32)
    assert not found[:, 3].any()
    assert not found[2].any()
    halves = [rounded(half, kind).dequantized(torch.float32) for half in exact.split(128, dim=1)]
    assert torch.equal(found, torch.cat(halves, dim=1))


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_numbers_that_are_exact_codes_stay(kind: str) -> None:
    codes = {
        "int8": torch.arange(-127, 1), "int4": torch.arange(128) % 16 - 5,
        "fp8": torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
    }[kind].float()  # fmt: skip
    codes[codes.isnan()] = 0
    for exact in (codes[None], -codes[None] * 0.25):
        assert torch.equal(rounded(exact, kind).dequantized(torch.float32), exact)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_is_refused(kind: str, number: float) -> None:
    exact = weight(256)
    exact[1, 200] = number
    with pytest.raises(ValueError, match="a scale is not finite"):
        rounded(exact, kind)
