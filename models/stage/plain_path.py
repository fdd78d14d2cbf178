"""A stage's layers as torch modules: the reference, and the layers of stages on GPUs.

Also the hidden states that a stage records for drafters that read them (feature heads). A layer is
named by its output: layer j of the model, -1 the embeddings, the last one normed. So a state
belongs to the stage that produces it. States of earlier stages are appended to the hidden states
and passed on to the last stage, which returns those of committed rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ...core.arrays import Int32
from ...core.errors import ConfigError
from ...core.steps import StepInput
from ...kernels.dispatch import Machine, choose_recurrence, load_recurrence
from ..attention.backend import AttentionBackend
from ..attention.step_attention import PagedKv, SdpaBackend
from ..device import free_host_memory, to_device
from ..layers.base_forward import BaseForward
from ..layers.fast_modules import RotaryTable
from ..layers.model_slice import ModelSlice, embedded, run_layers
from ..layers.weight_memory import held_bytes
from ..load.model_info import kv_shape
from ..load.partition import LayerSpan
from ..recurrence.state_pool import StatePool, StateShape
from ..recurrence.step_plan import StepPlan
from .options import carried_sizes

logger = logging.getLogger(__name__)

# Runs some of the stage's layers.
RunLayers = Callable[[Tensor, slice], Tensor]


class HiddenStateTaps:
    """The taps of one stage.

    input_size, output_size  columns of the hidden states that it takes and returns
    stops                    numbers of the stage's layers after which it records states, rising
    """

    def __init__(self, layers: Sequence[int], span: LayerSpan, hidden_size: int) -> None:
        """`layers` of the whole model, ascending."""
        last = span.num_layers - 1
        self._with_last = last in layers
        # The taps within the stage.
        first = -1 if span.is_first else span.first
        self._own = [layer for layer in layers if first <= layer < min(span.last, last)]
        self.stops = [layer + 1 - span.first for layer in self._own]
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
        for stop in self.stops:
            states = run_layers(states, slice(first, stop))
            first = stop
            noted.append(states)
        states = run_layers(states, slice(first, None))
        return torch.cat([states, *noted], dim=-1)

    def run_at_once(
        self, states: Tensor, run_layers: Callable[[Tensor, Sequence[int]], Tensor]
    ) -> Tensor:
        """As `run`, by a call that records the states after so many layers itself, side by side
        behind those after the last one."""
        states, before = states.split(self._inputs, dim=-1)
        recorded = run_layers(states, self.stops)
        if not before.shape[1]:
            return recorded
        own, noted = recorded.tensor_split([states.shape[1]], dim=-1)
        return torch.cat([own, before, noted], dim=-1)

    def features(self, states: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """float32 [rows, width]: the drafters' features, from the last stage's states of some
        rows. May be a view of `states`."""
        own, noted = states.split(self._outputs, dim=-1)
        if not self._with_last:
            return noted.float()
        return torch.cat([noted, norm(own.contiguous())], dim=-1).float()


class ComputePath(Protocol):
    """How a stage computes, chosen once when it is loaded (`load_stage`).

    part        the stage's modules
    kv          its cache, in blocks of `block_size`
    taps        the hidden states that it records
    states      of layers that keep any; None: none does
    """

    part: ModelSlice
    kv: PagedKv
    block_size: int
    taps: HiddenStateTaps
    states: StatePool | None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, as they are kept."""
        ...

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
        states: StatePool | None = None,
    ) -> None:  # fmt: skip
        """Without `attention`, torch's own is used; without `taps`, no states are recorded.

        states  of `make_states`
        """
        self.part, self.kv, self.block_size, self.states = part, kv, block_size, states
        self.attention = attention or SdpaBackend(kv, block_size)
        self.taps = taps or no_taps(part)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, as the modules keep them."""
        part = self.part
        return held_bytes(part.layers, part.embed, part.norm, part.head, part.forward)

    @cached_property
    def _rotary(self) -> RotaryTable:
        """Where the layers run one after the other."""
        return rotary_table(self.part)

    def move(self, moves: Int32) -> None:
        """Copy slots of the cache, int32 [m, 2] (from, to). All are read first."""
        self.attention.move(to_device(moves, self.part.device))

    def hidden_states(self, step: StepInput, hidden: Tensor | None) -> Tensor:
        """Run a step's layers: [rows, input_size] to [rows, output_size] of the taps."""
        return self._run(step, hidden, None if self.states is None else self.states.plan(step))

    def _run(self, step: StepInput, hidden: Tensor | None, plan: StepPlan | None) -> Tensor:
        """`plan`: the step's, of `states`."""
        part = self.part
        positions = to_device(step.positions, part.device)
        if part.forward is not None:
            return self._by_forward(part.forward, step, positions, hidden, plan)
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
        self, forward: BaseForward, step: StepInput, positions: Tensor, hidden: Tensor | None,
        plan: StepPlan | None,
    ) -> Tensor:  # fmt: skip
        if not len(step.token_ids):
            size = (0, self.taps.output_size)
            return torch.empty(size, dtype=self.part.dtype, device=self.part.device)
        positions = positions.long()
        tokens = to_device(step.token_ids, self.part.device).long()
        if hidden is None:
            hidden = forward.embedded(tokens, positions)
        attention = self.attention.begin(step)
        kept = None
        if self.states is not None and plan is not None:
            kept = self.states.begin(plan)
        return self.taps.run(
            hidden.to(self.part.device, non_blocking=True),
            lambda states, span: forward.run(states, tokens, positions, attention, span, kept),
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


def make_kv(
    part: ModelSlice, num_blocks: int, block_size: int, kv_cache_dtype: str = "auto"
) -> PagedKv:
    """An empty cache, in the stage's dtype or in FP8. FP8 uses the checkpoint's calibrated scales,
    or without these a scale for every row.

    Raises `ConfigError` (`kv_cache_dtype`), also for latents in FP8, and (`kv_cache_tokens`) where
    the host has no memory for it.
    """
    if kv_cache_dtype not in ("auto", "fp8"):
        raise ConfigError("kv_cache_dtype", f"must be auto or fp8, not {kv_cache_dtype!r}")
    shape, num_slots = kv_shape(part.config), num_blocks * block_size
    dtype, scales = part.dtype, None
    if kv_cache_dtype == "fp8":
        if shape.rotated_dim:
            raise ConfigError("kv_cache_dtype", "cannot be fp8: the model keeps latents; use auto")
        dtype, scales = torch.float8_e4m3fn, part.kv_scales
        if scales is None:
            size = (part.num_kv_layers, num_slots, 2, shape.num_heads)
            scales = torch.ones(size, device=part.device)
    num_bytes = part.num_kv_layers * num_slots * shape.num_numbers * dtype.itemsize
    if not _has_room(part.device, num_bytes):
        raise ConfigError(
            "kv_cache_tokens",
            f"{num_slots} take {num_bytes / 2**30:.1f} GiB, more than the host has free; lower it, "
            "or cut the model into more stages",
        )
    return PagedKv(
        part.num_kv_layers, num_slots, *shape,
        dtype=dtype, device=str(part.device), scales=scales,
    )  # fmt: skip


def make_states(
    part: ModelSlice, num_slots: int, num_rows: int, block_size: int, *,
    by_cpu_kernels: bool = False,
) -> StatePool | None:  # fmt: skip
    """Slots for so many states, in the layers that keep any; None: none does.

    num_rows        of the largest step and of earlier trees
    by_cpu_kernels  whether these compute the recurrences; they must be loaded

    Raises `ConfigError` (`max_num_seqs`) where the device has no memory for them.
    """
    shapes = [] if part.forward is None else part.forward.state_shapes
    if not shapes:
        return None
    like = torch.empty(0, dtype=part.dtype, device=part.device)
    name = choose_recurrence(Machine.of(part.device), by_cpu_kernels=by_cpu_kernels)
    recurrence = load_recurrence(name)
    slot, row = (
        sum(size(shape, part.dtype.itemsize) for shape in shapes)
        for size in (StateShape.slot_bytes, StateShape.row_bytes)
    )
    num_bytes = num_slots * slot + num_rows * row
    no_room = ConfigError(
        "max_num_seqs",
        f"takes {num_bytes / 2**30:.1f} GiB on {part.device}, which has no room for it: "
        f"{num_slots} states of requests and snapshots of {slot / 2**20:.1f} MiB, and {num_rows} "
        f"rows of trees of {row / 2**20:.2f} MiB; lower it, tree_nodes or max_num_batched_tokens, "
        "or cut the model into more stages",
    )
    if not _has_room(part.device, num_bytes):
        raise no_room
    try:
        pool = StatePool(shapes, num_slots, num_rows, block_size, like, recurrence)
    except RuntimeError as error:  # torch's, of a GPU and of a CPU
        raise no_room from error
    logger.info(
        "event=states_kept layers=%d slots=%d mib=%.1f by=%s",
        len(shapes), num_slots, pool.num_bytes / 2**20, name,
    )  # fmt: skip
    return pool


def _has_room(device: torch.device, num_bytes: int) -> bool:
    """Whether a CPU's stage finds so much memory, which the system promises in any case. Of a GPU
    torch says it.
    """
    free = free_host_memory() if device.type == "cpu" else None
    return free is None or num_bytes <= free


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
