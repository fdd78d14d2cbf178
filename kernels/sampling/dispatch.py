"""Which implementation of sampling runs, chosen once at start; and for which rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ...core.steps import SamplingRows
from ..dispatch import Machine, runs_triton
from .edit_tables import EditTables
from .tables import SamplingScratch, SamplingTables


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """Operators in Triton, defined in `kernels/sampling/reference.py`."""

    choose_tokens: Callable[[Tensor, SamplingTables, SamplingScratch, Tensor], None]
    edit_logits: Callable[[Tensor, EditTables, Tensor], None]


def choose_sampling(machine: Machine) -> str:
    """`triton` on GPUs that run the Triton attention kernels, else `torch`."""
    return "triton" if runs_triton(machine) else "torch"


def takes(sampling: SamplingRows) -> bool:
    """Whether the kernels can choose the tokens of these rows.

    They do not support typical_p, which orders tokens by their surprise, where bins of values do
    not help. torch chooses for all rows of such a step.
    """
    return bool((sampling.typical_p == 1).all())


def load_sampling() -> SamplingOps:
    """The operators; Triton is imported only where they are used."""
    from . import choose, logit_editing  # noqa: PLC0415

    return SamplingOps(choose.choose_tokens, logit_editing.edit_logits)
