"""The noise of `core/sampling.py` in Triton. Importing this file needs Triton.

Kernels that call `exact_noise` must be launched with `EXACT`: a fused multiply-add rounds once
where numpy rounds twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core import sampling as noise

EXACT = {"enable_fp_fusion": False}

GAMMA = tl.constexpr(noise.GAMMA)
MIX_1 = tl.constexpr(noise.MIX_1)
MIX_2 = tl.constexpr(noise.MIX_2)
LN2 = tl.constexpr(noise.LN2)
SQRT_HALF_BITS = tl.constexpr(0x3FE6A09E667F3BCD)
HALF_BITS = tl.constexpr(2**51)
ALL_BITS = tl.constexpr(2**52 - 1)
UNIT = tl.constexpr(2.0**-52)
TERM_15, TERM_13, TERM_11, TERM_9, TERM_7, TERM_5, TERM_3, TERM_1 = (
    tl.constexpr(term) for term in noise.ATANH_TERMS
)


@triton.jit
def noise_bits(keys, token_ids):
    """int64: the 52 random bits of each token; `keys` int64 as `core.sampling` makes them."""
    x = keys.to(tl.uint64) + token_ids.to(tl.uint64) * GAMMA
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return ((x ^ (x >> 31)) >> 12).to(tl.int64)


@triton.jit
def _series(square):
    """2 atanh(s) / s of a small s, by its square."""
    series = square * TERM_15 + TERM_13
    series = series * square + TERM_11
    series = series * square + TERM_9
    series = series * square + TERM_7
    series = series * square + TERM_5
    series = series * square + TERM_3
    return series * square + TERM_1


@triton.jit
def exact_log(x):
    """The logarithm of `core.sampling.exact_log`, operation by operation."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> 52
    mantissa = (bits - (exponent << 52)).to(tl.float64, bitcast=True)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    return exponent.to(tl.float64) * LN2 + _series(s * s) * s


@triton.jit
def exact_noise(bits):
    """float32 Gumbel noise of `noise_bits`, bit by bit that of `core.sampling.gumbel`."""
    uniform = (bits.to(tl.float64) + 0.5) * UNIT
    return (-exact_log(-exact_log(uniform))).to(tl.float32)


@triton.jit
def rough_noise(bits):
    """float32 noise that errs by less than 2e-5, in float32 throughout.

    A uniform near 1 is taken by its distance from 1, which float32 holds to 24 bits where it would
    round the uniform itself to 1. The fast logarithms of GPUs err by 2^-22 of the result or, near
    1, by 2^-22 itself; so does the inner one, and the outer one turns that into an absolute error.
    """
    is_high = bits >= HALF_BITS
    distance = tl.where(is_high, ALL_BITS - bits, bits)
    part = (distance.to(tl.float32) + 0.5) * UNIT
    s = part / (2.0 - part)
    surprise = tl.where(is_high, _series(s * s) * s, -tl.log(part))
    return -tl.log(surprise)
