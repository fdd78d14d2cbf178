"""Which hidden states a stage notes for drafters that go on from them (feature heads).

A layer is named by its output: layer j of the model, -1 the embeddings, the last one normed. So a
state belongs to the stage that produces it. What is noted of earlier layers travels behind the
hidden states, from stage to stage, to the last one, which hands out that of committed rows: the
states themselves or, of a head whose first matrix reads several layers side by side, one running
sum, to which each stage adds what the matrix makes of its own layers (`FeatureSum`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..load.partition import LayerSpan
from .options import FeatureSum

# Runs some of the stage's layers.
RunLayers = Callable[[Tensor, slice], Tensor]
# What a head's first matrix makes of one layer's states: [rows, size] of [rows, hidden_size].
Projection = Callable[[Tensor], Tensor]
# Loads those of some of a sum's layers, by layer, for states of a dtype on a device.
LoadProjections = Callable[
    [FeatureSum, Sequence[int], torch.dtype, torch.device], Mapping[int, Projection]
]


class FeatureTaps:
    """The taps of one stage.

    input_size, output_size  columns of the hidden states that it takes and hands on
    """

    def __init__(
        self,
        layers: Sequence[int],
        span: LayerSpan,
        hidden_size: int,
        sums: Sequence[FeatureSum] = (),
        projections: Sequence[Mapping[int, Projection]] = (),
    ) -> None:
        """`layers` of the whole model, ascending; `projections` of each sum's layers that
        `layers_of` names."""
        last = span.num_layers - 1
        self._last, self._with_last = last, last in layers
        self._projections = tuple(projections)
        # Those that end within the stage, and what of them is noted as it is.
        tapped = {layer for one in sums for layer in layers_of(one, span)}
        tapped.update(layer for layer in layers if _ends_in(layer, span))
        self._own = sorted(tapped - {last})
        self._noted = frozenset(layers)
        # What has run when each is noted: so many of the stage's layers.
        self._stops = [layer + 1 - span.first for layer in self._own]
        self._inputs = carried_sizes(layers, sums, span.first, span.num_layers, hidden_size)
        self._outputs = carried_sizes(layers, sums, span.last, span.num_layers, hidden_size)
        self.input_size, self.output_size = sum(self._inputs), sum(self._outputs)

    @property
    def needs_layers(self) -> bool:
        """Whether it stops between two layers, or is handed more than hidden states."""
        return bool(self._own) or self.input_size > self._inputs[0]

    def run(self, states: Tensor, run_layers: RunLayers) -> Tensor:
        """Hidden states [rows, output_size] of [rows, input_size]: behind what the layers make of
        their first columns stand the states that were noted, in the order of the layers, and the
        sums.
        """
        if not self.needs_layers:
            return run_layers(states, slice(None))
        states, before, *sums = states.split(self._inputs, dim=-1)
        noted, first = [before], 0
        if self.input_size > self._inputs[0]:
            # Operators read rows one behind the other.
            states = states.contiguous()
        for layer, stop in zip(self._own, self._stops, strict=True):
            states = run_layers(states, slice(first, stop))
            first = stop
            if layer in self._noted:
                noted.append(states)
            sums = self._with_shares(sums, layer, states)
        states = run_layers(states, slice(first, None))
        return torch.cat([states, *noted, *sums], dim=-1)

    def features(self, states: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """float32 [rows, width]: what drafters get of the last stage's states of some rows: those
        of layers, then the sums."""
        own, noted, *sums = states.split(self._outputs, dim=-1)
        parts, last = [noted], self._last
        if self._with_last or any(last in projections for projections in self._projections):
            normed = norm(own.contiguous())
            parts += [normed] if self._with_last else []
            sums = self._with_shares(sums, last, normed)
        return torch.cat([*parts, *sums], dim=-1).float()

    def _with_shares(self, sums: Sequence[Tensor], layer: int, states: Tensor) -> list[Tensor]:
        """The sums [rows, size] with what a layer adds to those that read it; [rows, 0] before the
        first of their layers."""
        after = list(sums)
        for index, projections in enumerate(self._projections):
            if layer in projections:
                share = projections[layer](states)
                after[index] = sums[index] + share if sums[index].shape[-1] else share
        return after


def layers_of(one: FeatureSum, span: LayerSpan) -> list[int]:
    """Layers of a sum whose states a stage has: those that it computes."""
    return [layer for layer in one.layers if _ends_in(layer, span)]


def carried_sizes(
    layers: Sequence[int], sums: Sequence[FeatureSum], before: int, num_layers: int,
    hidden_size: int,
) -> list[int]:  # fmt: skip
    """Columns of hidden states after the layers up to `before`: their own, those of `layers` until
    there, and those of each sum, 0 before its first layer. The last layer's own are no copy."""
    end = min(before, num_layers - 1)
    num_noted = sum(layer < end for layer in layers) if before else 0
    begun = [one.size if before and min(one.layers) < end else 0 for one in sums]
    return [hidden_size, num_noted * hidden_size, *begun]


def _ends_in(layer: int, span: LayerSpan) -> bool:
    return (-1 if span.is_first else span.first) <= layer < span.last
