"""Counter-based sampling noise: a pure function of (seed, position, token id).

Adding standard Gumbel noise to log-probabilities and taking the argmax samples exactly from them
(Gumbel-max). Because the noise depends on nothing but the request's seed, the absolute position
of the token being chosen and the token id, a token's choice does not depend on what was drafted,
on the batch or on the tree; and drafters that add the same noise agree with the target more often.

Bits come from the SplitMix64 generator (Steele, Lea, Flood 2014) keyed by seed and position, with
the token id as counter. The logarithm is computed from additions, multiplications, divisions and
bit operations only, each of which IEEE 754 rounds the same way everywhere, so that numpy, torch
and Triton (without fused multiply-add) give the same float32 noise bit by bit.
Formula: docs/how-it-works.md, "Coupled sampling".
`kernels/sampling/reference.py` is the same in torch, `kernels/sampling/noise_kernels.py` in
Triton; change all together.
"""

from __future__ import annotations

import math

import numpy as np

from ..arrays import Float32, Float64, Int64, UInt64

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

LN2 = math.log(2.0)
# 2 * atanh(s) = 2 * (s + s^3/3 + s^5/5 + ...); |s| <= 0.1716 leaves an error below 1e-13.
ATANH_TERMS = tuple(2.0 / power for power in (15, 13, 11, 9, 7, 5, 3, 1))


def mix64(x: UInt64) -> UInt64:
    """SplitMix64's finaliser: a bijection of 64-bit words whose output bits look independent."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))


def stream_keys(seeds: Int64, positions: Int64) -> UInt64:
    """One 64-bit key for each (seed, position) pair; arrays of equal shape."""
    gamma = np.uint64(GAMMA)
    by_seed = mix64(seeds.astype(np.uint64) + gamma)
    return mix64(by_seed ^ mix64(positions.astype(np.uint64) * gamma + gamma))


def exact_log(x: Float64) -> Float64:
    """Natural logarithm of positive normal float64 by exactly rounded operations only."""
    bits = x.view(np.int64)
    # Shift the mantissa into [sqrt(1/2), sqrt(2)) by subtracting the bits of sqrt(1/2).
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    mantissa = (bits - (exponent << 52)).view(np.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.full_like(s, ATANH_TERMS[0])
    for term in ATANH_TERMS[1:]:
        series = series * square + term
    return exponent.astype(np.float64) * LN2 + series * s


def uniform(seeds: Int64, positions: Int64, token_ids: Int64) -> Float64:
    """The uniforms on the open interval (0, 1) that `gumbel` is made of; the same arguments."""
    seeds, positions = np.broadcast_arrays(seeds, positions)
    keys = stream_keys(seeds, positions)
    bits = mix64(keys + token_ids.astype(np.uint64) * np.uint64(GAMMA))
    # 52 bits and a half: exact in float64.
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def gumbel_of(uniforms: Float64) -> Float32:
    """Standard Gumbel noise of uniforms."""
    return (-exact_log(-exact_log(uniforms))).astype(np.float32)


def gumbel(seeds: Int64, positions: Int64, token_ids: Int64) -> Float32:
    """Standard Gumbel noise, float32; `seeds`, `positions` and `token_ids` broadcast together.

    For a whole vocabulary pass seeds and positions as [rows, 1] and `np.arange(vocab_size)`.
    """
    return gumbel_of(uniform(seeds, positions, token_ids))
