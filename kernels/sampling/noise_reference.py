"""`core/sampling/noise.py` in torch: the same noise, bit by bit, on every device.

torch has no unsigned 64-bit arithmetic on all devices; int64 wraps in the same way, and a logical
shift is an arithmetic shift with the copied sign bits masked off. Change both files together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.sampling.noise import ATANH_TERMS, GAMMA, LN2, MIX_1, MIX_2


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_GAMMA, _MIX_1, _MIX_2 = _signed(GAMMA), _signed(MIX_1), _signed(MIX_2)


def _xor_shifted(x: Tensor, shift: int) -> Tensor:
    return (x >> shift).bitwise_and_((1 << (64 - shift)) - 1).bitwise_xor_(x)


def _mix64(x: Tensor) -> Tensor:
    x = _xor_shifted(x, 30).mul_(_MIX_1)
    x = _xor_shifted(x, 27).mul_(_MIX_2)
    return _xor_shifted(x, 31)


def _exact_log(x: Tensor) -> Tensor:
    bits = x.view(torch.int64)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    mantissa = (bits - (exponent << 52)).view(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = torch.full_like(s, ATANH_TERMS[0])
    for term in ATANH_TERMS[1:]:
        # Two roundings, never a fused one: numpy has none.
        series = series.mul_(square).add_(term)
    return (exponent.to(torch.float64) * LN2).add_(series.mul_(s))


def stream_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """The int64 bits of `core.sampling.noise.stream_keys`."""
    return _mix64(_mix64(seeds + _GAMMA) ^ _mix64(positions * _GAMMA + _GAMMA))


def uniform(keys: Tensor, token_ids: Tensor) -> Tensor:
    """The float64 uniforms on the open interval (0, 1) that `gumbel` is made of."""
    bits = _mix64(keys + token_ids * _GAMMA)
    bits = (bits >> 12).bitwise_and_((1 << 52) - 1)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-52)


def gumbel_of(uniforms: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, of the answers of `uniform`."""
    return (-_exact_log(-_exact_log(uniforms))).to(torch.float32)


def gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32; int64 tensors that broadcast together.

    Equals `core.sampling.noise.gumbel` bit by bit.
    """
    return gumbel_of(uniform(stream_keys(seeds, positions), token_ids))
