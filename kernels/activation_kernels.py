"""Activations of gated feed-forward blocks, in Triton. Importing this file needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)
GELU_CUBE = tl.constexpr(0.044715)


@triton.jit
def activated(x, IS_GELU: tl.constexpr):
    """SiLU, or GELU by its tanh formula, of float32 numbers."""
    # (1 + tanh(y)) / 2 is the sigmoid of 2 y.
    inner = SQRT_8_OVER_PI * (x + GELU_CUBE * x * x * x) if IS_GELU else x
    # Bounded, so that exp stays finite.
    return x / (1.0 + tl.exp(tl.minimum(-inner, 88.0)))
