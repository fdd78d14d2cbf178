"""Which hidden states a stage notes for drafters that go on from them (feature heads).

A layer is named by its output: layer j of the model, -1 the embeddings, the last one normed. So a
state belongs to the stage that produces it. States of earlier layers travel behind the hidden
states, from stage to stage, to the last one, which hands out those of committed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..load.partition import LayerSpan

# Runs some of the stage's layers.
RunLayers = Callable[[Tensor, slice], Tensor]


class FeatureTaps:
    """The taps of one stage.

    input_size, output_size  columns of the hidden states that it takes and hands on
    """

    def __init__(self, layers: Sequence[int], span: LayerSpan, hidden_size: int) -> None:
        """`layers` of the whole model, ascending."""
        last = span.num_layers - 1
        self._hidden_size = hidden_size
        # What has run when each is noted: so many of the stage's layers.
        first = -1 if span.is_first else span.first
        self._own = [
            layer + 1 - span.first for layer in layers if first <= layer < min(span.last, last)
        ]
        self._with_last = last in layers
        self.input_size = carried_size(layers, span.first, span.num_layers, hidden_size)
        self.output_size = carried_size(layers, span.last, span.num_layers, hidden_size)

    @property
    def needs_layers(self) -> bool:
        """Whether it stops between two layers, or is handed more than hidden states."""
        return bool(self._own) or self.input_size > self._hidden_size

    def run(self, states: Tensor, run_layers: RunLayers) -> Tensor:
        """Hidden states [rows, output_size] of [rows, input_size]: behind what the layers make of
        their first columns stand the states that were noted, in the order of the layers.
        """
        if not self.needs_layers:
            return run_layers(states, slice(None))
        noted = [states[:, self._hidden_size :]]
        states = states[:, : self._hidden_size]
        for first, last in pairwise((0, *self._own, None)):
            states = run_layers(states, slice(first, last))
            noted.append(states)
        # What leaves the stage.
        noted.pop()
        return torch.cat([states, *noted], dim=-1)

    def features(self, states: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """float32 [rows, width]: what drafters get of the last stage's states of some rows."""
        parts = [states[:, self._hidden_size :]]
        if self._with_last:
            parts.append(norm(states[:, : self._hidden_size].contiguous()))
        return torch.cat(parts, dim=-1).float()


def carried_size(layers: Sequence[int], before: int, num_layers: int, hidden_size: int) -> int:
    """Columns of hidden states after the layers up to `before`: their own, and those of `layers`
    until there. The last layer's own states are no copy."""
    if not before:
        return hidden_size
    return hidden_size * (1 + sum(layer < min(before, num_layers - 1) for layer in layers))
