"""A step's attention as an operator that a compiled graph can call.

The graph is the same for all steps, so the step is no argument of it: `attending` says which one
the thread computes now.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .step_attention import StepAttention

LIBRARY = torch.library.Library("draftline", "FRAGMENT")
LIBRARY.define(
    "attend(Tensor heads, int layer, int num_heads, float scaling, int? window, float? softcap)"
    " -> Tensor"
)
_now = threading.local()


@contextmanager
def attending(step: StepAttention) -> Iterator[None]:
    """Within it, this thread's `attend` is about `step`."""
    _now.step = step
    try:
        yield
    finally:
        del _now.step


def attend(  # noqa: PLR0917 - the operator's
    heads: Tensor, layer: int, num_heads: int, scaling: float,
    window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Store the keys and values of the rows, then attend; [rows, num_heads * head_dim].

    `heads` [rows, num_heads + 2 * kv_heads, head_dim]: queries, keys, values, rotated already.
    """
    return torch.ops.draftline.attend(heads, layer, num_heads, scaling, window, softcap)


def _attend(  # noqa: PLR0917 - the operator's
    heads: Tensor, layer: int, num_heads: int, scaling: float,
    window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    step: StepAttention = _now.step
    num_rows, _, head_dim = heads.shape
    step.write(layer, heads[:, num_heads:].view(num_rows, 2, -1, head_dim))
    out = step.attend(layer, heads[:, :num_heads], scaling, window, softcap)
    return out.reshape(num_rows, num_heads * head_dim)


def _shape(heads: Tensor, _layer: int, num_heads: int, *_options: object) -> Tensor:
    return heads.new_empty(heads.shape[0], num_heads * heads.shape[2])


LIBRARY.impl("attend", _attend, "CPU")
torch.library.register_fake("draftline::attend", _shape, lib=LIBRARY)
