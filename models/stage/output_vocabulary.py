"""Logits of a model in the ids of another vocabulary.

Only the rows of the output head that have such an id are computed; other ids get minus infinity, so
that the softmax is over the common tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...core.arrays import Int64
from ..layers.fast_modules import FastLinear
from ..layers.gpu_linear import GpuHead
from ..layers.model_slice import ModelSlice, Projection


@dataclass(frozen=True, slots=True, eq=False)
class OutputVocabulary:
    """The rows of a head to compute, and their ids in the other vocabulary.

    rows     int64 [n]  of the head: the model's own ids
    columns  int64 [n]  the other vocabulary's ids of these rows, all different
    size     ids of the other vocabulary
    """

    rows: Int64
    columns: Int64
    size: int


def with_pruned_head(part: ModelSlice, output: OutputVocabulary | None) -> ModelSlice:
    """The slice with the rows of its head that `output` names, in its order; None: with all."""
    if output is None:
        return part
    assert part.head is not None
    head = pruned_head(part.head, output.rows)
    if part.forward is not None:
        assert isinstance(head, nn.Module)
        part.forward.prune_head(head)
    return replace(part, head=head)


def pruned_head(head: Projection, rows: Int64) -> Projection:
    """These rows of a slice's head, int64 [n], in their order."""
    if isinstance(head, GpuHead):
        return head.of_rows(torch.from_numpy(rows).to(head.weight.device))
    assert isinstance(head, FastLinear | nn.Linear)
    is_fast = isinstance(head, FastLinear)
    weight = head.weight.t() if is_fast else head.weight
    kept = torch.from_numpy(rows).to(weight.device)
    pruned = nn.Linear(weight.shape[1], len(kept), bias=head.bias is not None, device="meta")
    pruned.weight = nn.Parameter(weight[kept].contiguous(), requires_grad=False)
    if head.bias is not None:
        pruned.bias = nn.Parameter(head.bias[kept].contiguous(), requires_grad=False)
    return FastLinear(pruned) if is_fast else pruned


class LogitsMap:
    """Puts the logits of a pruned head at the ids of the other vocabulary."""

    __slots__ = ("_columns", "size")

    def __init__(self, output: OutputVocabulary, device: torch.device) -> None:
        self._columns = torch.from_numpy(output.columns).to(device)
        self.size = output.size

    def __call__(self, logits: Tensor) -> Tensor:
        """[rows, n] -> [rows, size], minus infinity for ids without a row of the head."""
        mapped = logits.new_full((len(logits), self.size), -torch.inf)
        mapped[:, self._columns] = logits
        return mapped
