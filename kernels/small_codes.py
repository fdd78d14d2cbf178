"""Numbers of 4-bit and FP8 codes that the kernels of CPUs and GPUs share."""

from __future__ import annotations

import torch
from torch import Tensor

# Of a float32, below its exponent.
FRACTION_BITS = 23
# The largest code of 4 bits.
LARGEST_UINT4 = 15
# Makes up for the exponent's bias of an e4m3 code whose bits are read as those of a float32.
E4M3_SHIFT = 2.0**120
# Largest scale with which that is finite.
LARGEST_E4M3_SCALE = 2.0**7
# The same of e2m1 on GPUs; on CPUs, where such floats are slow, its numbers are looked up.
E2M1_SHIFT = 2.0**126
LARGEST_E2M1_SCALE = 2.0
# The numbers of e2m1 by their codes; those of MXFP4.
E2M1_NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E2M1_AS_E4M3 = E2M1_NUMBERS.to(torch.float8_e4m3fn).view(torch.uint8)


def e2m1_codes(codes: Tensor) -> Tensor | None:
    """The uint8 codes of e2m1 for codes of e4m3 of any shape, if that has all their numbers."""
    numbers = codes.view(torch.uint8)
    # Most codes of 8 bits have one of the lowest bits, and need no more than this.
    if (numbers & 3).any():
        return None
    table = numbers.new_full((256,), LARGEST_UINT4 + 1)
    table[E2M1_AS_E4M3.to(numbers.device).long()] = torch.arange(
        16, dtype=torch.uint8, device=numbers.device
    )
    found = table[numbers.int()]
    return found if found.max() <= LARGEST_UINT4 else None


def powers_of_two(scales: Tensor) -> Tensor | None:
    """float32 scales as exponents, uint8 as of e8m0, if they are normal powers of two."""
    bits = scales.view(torch.int32)
    exponents = bits >> FRACTION_BITS
    is_power = (bits == exponents << FRACTION_BITS) & (exponents > 0)
    return exponents.byte() if bool(is_power.all()) else None


def of_powers(exponents: Tensor) -> Tensor:
    """The float32 scales of `powers_of_two`."""
    return (exponents.int() << FRACTION_BITS).view(torch.float32)
