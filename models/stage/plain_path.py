"""A stage's layers as torch modules: the reference, and the layers of stages on GPUs."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ...core.arrays import Int32
from ...core.steps import StepInput
from ..attention.backend import AttentionBackend, SdpaBackend
from ..attention.step_attention import PagedKv
from ..device import to_device
from ..layers.base_forward import BaseForward
from ..layers.fast_modules import RotaryTable
from ..layers.model_slice import ModelSlice, embedded, run_layers
from ..load.partition import LayerSpan
from .hidden_state_taps import HiddenStateTaps


class ComputePath(Protocol):
    """How a stage computes, chosen once when it is loaded (`load_stage`).

    part        the stage's modules
    kv          its cache, in blocks of `block_size`
    taps        the hidden states that it records
    """

    part: ModelSlice
    kv: PagedKv
    block_size: int
    taps: HiddenStateTaps

    def move(self, moves: Int32) -> None:
        """Copy slots of the cache, int32 [m, 2] (from, to). All are read first."""
        ...

    def hidden_states(self, step: StepInput, hidden: Tensor | None) -> Tensor:
        """Run a step's layers: [rows, input_size] to [rows, output_size] of the taps.

        The first stage embeds tokens; `hidden` is None there. Writes the KV of the step's rows.
        """
        ...

    def normed(self, hidden: Tensor) -> Tensor:
        """The last layer's states [rows, hidden_size] as the output head reads them."""
        ...

    def projected(self, normed: Tensor) -> Tensor:
        """[rows, vocabulary] of normed states, by the output head."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocabulary] of the last layer's states [rows, hidden_size]."""
        ...


class PlainPath:
    """Runs the modules one after the other, with attention by one backend."""

    def __init__(
        self, part: ModelSlice, kv: PagedKv, block_size: int,
        attention: AttentionBackend | None = None, taps: HiddenStateTaps | None = None,
    ) -> None:  # fmt: skip
        """Without `attention`, torch's own is used; without `taps`, no states are recorded."""
        self.part, self.kv, self.block_size = part, kv, block_size
        self.attention = attention or SdpaBackend(kv, block_size)
        self.taps = taps or no_taps(part)

    @cached_property
    def _rotary(self) -> RotaryTable:
        """Where the layers run one after the other."""
        return rotary_table(self.part)

    def move(self, moves: Int32) -> None:
        """Copy slots of the cache, int32 [m, 2] (from, to). All are read first."""
        self.attention.move(to_device(moves, self.part.device))

    def hidden_states(self, step: StepInput, hidden: Tensor | None) -> Tensor:
        """Run a step's layers: [rows, input_size] to [rows, output_size] of the taps."""
        part = self.part
        positions = to_device(step.positions, part.device)
        if part.forward is not None:
            return self._by_forward(part.forward, step, positions, hidden)
        states = layer_input(part, step, hidden)
        if not len(states):
            return states.new_empty(0, self.taps.output_size)
        rotations = self._rotary.rotations(positions, int(step.positions.max()))
        attention = self.attention.begin(step)
        return self.taps.run(
            states.to(part.device, non_blocking=True),
            lambda states, span: run_layers(
                part, states, positions, rotations, attention, span=span
            ),
        )

    def _by_forward(
        self, forward: BaseForward, step: StepInput, positions: Tensor, hidden: Tensor | None
    ) -> Tensor:
        if not len(step.token_ids):
            size = (0, self.taps.output_size)
            return torch.empty(size, dtype=self.part.dtype, device=self.part.device)
        positions = positions.long()
        tokens = to_device(step.token_ids, self.part.device).long()
        if hidden is None:
            hidden = forward.embedded(tokens, positions)
        attention = self.attention.begin(step)
        return self.taps.run(
            hidden.to(self.part.device, non_blocking=True),
            lambda states, span: forward.run(states, tokens, positions, attention, span),
        )

    def normed(self, hidden: Tensor) -> Tensor:
        """The last layer's states [rows, hidden_size] as the output head reads them."""
        if self.part.forward is not None:
            return self.part.forward.normed(hidden)
        assert self.part.norm is not None
        return self.part.norm(hidden)

    def projected(self, normed: Tensor) -> Tensor:
        """[rows, vocabulary] of normed states, by the output head."""
        if self.part.forward is not None:
            return self.part.forward.projected(normed)
        assert self.part.head is not None
        return self.part.head(normed)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocabulary] of the last layer's states [rows, hidden_size]."""
        logits = self.projected(self.normed(hidden)).float()
        softcap = self.part.softcap
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def no_taps(part: ModelSlice) -> HiddenStateTaps:
    """Taps that record no states."""
    num_layers = len(part.layers)
    return HiddenStateTaps((), LayerSpan(0, num_layers, num_layers), part.config.hidden_size)


def rotary_table(part: ModelSlice) -> RotaryTable:
    """The rotations of a slice's layers."""
    assert part.rotary is not None
    like = torch.empty(0, dtype=part.dtype, device=part.device)
    layer_types = [kind for kind in part.layer_types if kind is not None]
    return RotaryTable(part.rotary, layer_types, like, flat=part.fast)


def layer_input(part: ModelSlice, step: StepInput, hidden: Tensor | None) -> Tensor:
    """The states that the first of the stage's layers reads: its embeddings, or `hidden`."""
    if part.embed is not None:
        hidden = embedded(part.embed, to_device(step.token_ids, part.device))
    assert hidden is not None
    assert len(hidden) == len(step.token_ids)
    return hidden
