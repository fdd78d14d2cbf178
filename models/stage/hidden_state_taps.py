"""The hidden states that a stage records for drafters that read them (feature heads).

A layer is named by its output: layer j of the model, -1 the embeddings, the last one normed. So a
state belongs to the stage that produces it. States recorded by earlier stages are appended to the
hidden states and passed on to the last stage, which returns those of committed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..load.partition import LayerSpan

# Runs some of the stage's layers.
RunLayers = Callable[[Tensor, slice], Tensor]


class HiddenStateTaps:
    """The taps of one stage.

    input_size, output_size  columns of the hidden states that it takes and returns
    """

    def __init__(self, layers: Sequence[int], span: LayerSpan, hidden_size: int) -> None:
        """`layers` of the whole model, ascending."""
        last = span.num_layers - 1
        self._with_last = last in layers
        # The taps within the stage.
        first = -1 if span.is_first else span.first
        self._own = [layer for layer in layers if first <= layer < min(span.last, last)]
        # The number of the stage's layers that run before each tap.
        self._stops = [layer + 1 - span.first for layer in self._own]
        self._inputs = carried_sizes(layers, span.first, span.num_layers, hidden_size)
        self._outputs = carried_sizes(layers, span.last, span.num_layers, hidden_size)
        self.input_size, self.output_size = sum(self._inputs), sum(self._outputs)

    @property
    def needs_layers(self) -> bool:
        """Whether it records states between two layers, or its input has more than hidden
        states."""
        return bool(self._own) or self.input_size > self._inputs[0]

    def run(self, states: Tensor, run_layers: RunLayers) -> Tensor:
        """Run the layers: hidden states [rows, input_size] to [rows, output_size]. The layers
        transform the first columns; the recorded states follow, in the order of the layers.
        """
        if not self.needs_layers:
            return run_layers(states, slice(None))
        states, before = states.split(self._inputs, dim=-1)
        noted, first = [before], 0
        if self.input_size > self._inputs[0]:
            # The kernels need contiguous rows.
            states = states.contiguous()
        for stop in self._stops:
            states = run_layers(states, slice(first, stop))
            first = stop
            noted.append(states)
        states = run_layers(states, slice(first, None))
        return torch.cat([states, *noted], dim=-1)

    def features(self, states: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """float32 [rows, width]: the drafters' features, from the last stage's states of some
        rows."""
        own, noted = states.split(self._outputs, dim=-1)
        parts = [noted, norm(own.contiguous())] if self._with_last else [noted]
        return torch.cat(parts, dim=-1).float()


def carried_sizes(
    layers: Sequence[int], before: int, num_layers: int, hidden_size: int
) -> list[int]:
    """Columns of hidden states after the layers up to `before`: their own, and those of the taps in
    `layers` so far. The last layer's tap needs no copy."""
    end = min(before, num_layers - 1)
    num_noted = sum(layer < end for layer in layers) if before else 0
    return [hidden_size, num_noted * hidden_size]
