"""Products of Triton's interpreter with a fixed order of additions, as tensor cores have.

The interpreter multiplies by numpy, and its library rounds a row by its place in the tile on some
processors (OpenBLAS with the kernels for Haswell and Zen).
"""

from __future__ import annotations

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def sum_in_order(
    _builder: InterpreterBuilder,
    a: TensorHandle,
    b: TensorHandle,
    d: TensorHandle,
    _input_precision: object,
    _max_num_imprecise_acc: object,
) -> TensorHandle:
    """`tl.dot`: `a` [..., rows, inputs] times `b` [..., inputs, outputs], added to `d`."""
    total = d.data.copy()
    for column in range(a.data.shape[-1]):
        left, right = a.data[..., :, column, None], b.data[..., column, None, :]
        total += np.multiply(left, right, dtype=total.dtype)
    return TensorHandle(total, d.dtype.scalar)


def use_products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """For kernels that a test runs interpreted from now on."""
    monkeypatch.setattr(InterpreterBuilder, "create_dot", sum_in_order)
