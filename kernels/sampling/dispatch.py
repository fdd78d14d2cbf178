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
    """Operators in Triton; `reference.py` and `edit_reference.py` here say what each does."""

    choose_tokens: Callable[[Tensor, SamplingTables, SamplingScratch, Tensor], None]
    edit_logits: Callable[[Tensor, EditTables, Tensor], None]


def choose_sampling(machine: Machine) -> str:
    """`triton` on GPUs that attention by Triton runs on, else `torch`."""
    return "triton" if runs_triton(machine) else "torch"


def takes(sampling: SamplingRows) -> bool:
    """Whether the kernels choose for these rows.

    With a typical_p they do not: it orders tokens by their surprise, where no bins of values help;
    torch chooses for all rows of such a step.
    """
    return bool((sampling.typical_p == 1).all())


def load_sampling() -> SamplingOps:
    """The operators; Triton is imported only where they are used."""
    from . import choose, logit_editing  # noqa: PLC0415

    return SamplingOps(choose.choose_tokens, logit_editing.edit_logits)
