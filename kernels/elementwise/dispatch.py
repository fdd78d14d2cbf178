"""The elementwise operators of one implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .reference import HeadNorms, KvTarget


@dataclass(frozen=True, slots=True)
class ElementwiseOps:
    """Row-wise operators; `kernels/elementwise/reference.py` defines them."""

    rms_norm: Callable[..., None]
    rotate: Callable[[Tensor, Tensor, Tensor], None]
    turn_and_store: Callable[[Tensor, Tensor, Tensor, HeadNorms | None, KvTarget], None]
    gated: Callable[[Tensor, Tensor, str], None]
    log_softmax: Callable[[Tensor, Tensor], None]


def load_elementwise(name: str) -> ElementwiseOps:
    """The operators of `triton` or `reference`; Triton is imported only where it is used."""
    if name == "reference":
        from . import reference as ops  # noqa: PLC0415
    else:
        from . import ops  # noqa: PLC0415
    return ElementwiseOps(ops.rms_norm, ops.rotate, ops.turn_and_store, ops.gated, ops.log_softmax)
