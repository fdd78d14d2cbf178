"""States of a stage's requests, in layers without attention, and what is kept of rows of steps.

A request has a slot as long as it holds KV (`StepInput.state_slots`): in each layer the state
behind its text, and the last inputs of the short convolution. Of each row of a tree, the layer's
inputs and what the recurrence leaves are kept under the row's KV slot, and move as KV does. In the
request's next step, rows that its text has passed are found at the KV slots of their positions, and
its state takes them in. Nodes of a pipelined tree that are still in flight are found there, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Int32, Int64
from ...core.errors import StageError
from ...core.steps import StepInput
from ...kernels.device_tables import RecentTables
from ...kernels.dispatch import Recurrence, load_recurrence
from ...kernels.recurrence.step_tables import BLOCK, StepTables, TablesCapacity
from .step_plan import StepPlan, load_plans

logger = logging.getLogger(__name__)

NO_ORDER = np.empty((0, 4), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes of one layer's state.

    num_channels   inputs of the short convolution
    width          of it, with the row's own input
    num_heads      of the state; 0: the layer has none beside the convolution
    num_key_heads  of keys and queries, each of which serves as many heads
    key_dim, value_dim
    num_decays     of a head: 1, or key_dim
    """

    num_channels: int
    width: int
    num_heads: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    num_decays: int = 1

    def slot_bytes(self, itemsize: int) -> int:
        """Of one request, whose inputs have `itemsize` bytes."""
        state = 4 * self.num_heads * self.key_dim * self.value_dim
        return state + itemsize * (self.width - 1) * self.num_channels

    def row_bytes(self, itemsize: int) -> int:
        """Of one row that is kept."""
        rule = self.num_key_heads * self.key_dim
        rule += self.num_heads * (self.num_decays + self.value_dim)
        return 4 * rule + itemsize * self.num_channels


class LayerStates:
    """The tensors of one layer.

    states      float32 [slots, heads, key_dim, value_dim]
    inputs      [places, channels]  of the convolution: a row of zeros, the last ones of each slot's
                text, and those of kept rows
    keys, log_decays, deltas  float32 [kept rows, ...]  as in `walk`
    """

    __slots__ = ("deltas", "inputs", "keys", "log_decays", "shape", "states")

    def __init__(self, shape: StateShape, num_slots: int, num_rows: int, like: Tensor) -> None:
        """`like` has the stage's dtype and device."""
        self.shape = shape
        first = 1 + num_slots * (shape.width - 1)
        heads, device = shape.num_heads, like.device
        size = (num_slots, heads, shape.key_dim, shape.value_dim)
        self.states = torch.zeros(size, device=device)
        self.inputs = like.new_zeros(first + num_rows, shape.num_channels)
        self.keys = torch.zeros(num_rows, shape.num_key_heads, shape.key_dim, device=device)
        self.log_decays = torch.zeros(num_rows, heads, shape.num_decays, device=device)
        self.deltas = torch.zeros(num_rows, heads, shape.value_dim, device=device)

    def grow(self, num_rows: int) -> None:
        """Have room for so many more kept rows."""
        for name in ("inputs", "keys", "log_decays", "deltas"):
            tensor = getattr(self, name)
            more = tensor.new_zeros(num_rows, *tensor.shape[1:])
            setattr(self, name, torch.cat([tensor, more]))

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        tensors = self.states, self.inputs, self.keys, self.log_decays, self.deltas
        return sum(tensor.nbytes for tensor in tensors)


@dataclass(slots=True)
class _Slot:
    """Which text a slot's state is behind.

    length  tokens that it has taken in; -1: nobody's
    rows    kept rows by their KV slots: place, and position in the text
    """

    length: int = -1
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def places(self) -> set[int]:
        """Of its kept rows, each of which may be at several KV slots."""
        return {place for place, _ in self.rows.values()}


class StatePool:
    """All layers of a stage. One thread uses it; steps come in order."""

    def __init__(
        self, shapes: Sequence[StateShape], num_slots: int, num_rows: int, block_size: int,
        like: Tensor, recurrence: Recurrence | None = None,
    ) -> None:  # fmt: skip
        """Room for the states of `num_slots` requests, and at first for `num_rows` kept rows.

        The layers' convolutions have one width. `like` has the stage's dtype and device.
        By default torch goes over each path.
        """
        self._recurrence = recurrence or load_recurrence("walk")
        self._device = like.device
        self._tables: RecentTables[TablesCapacity, StepTables] = RecentTables()
        # Row 0 is of rows of padding.
        num_rows += 1
        self._window = shapes[0].width - 1
        self._block_size, self.num_slots = block_size, num_slots
        self.layers = tuple(LayerStates(shape, num_slots, num_rows, like) for shape in shapes)
        self._slots = [_Slot() for _ in range(num_slots)]
        self._free = list(range(num_rows - 1, 0, -1))
        # Kept rows that there is room for.
        self.num_rows = num_rows
        # Places of rows that no later step reads.
        self._spent: list[int] = []
        load_plans()

    @property
    def num_bytes(self) -> int:
        """Of all states and kept rows."""
        return sum(layer.num_bytes for layer in self.layers)

    def reset(self) -> None:
        """Forget all texts."""
        for slot in self._slots:
            self._spent += slot.places
            slot.rows, slot.length = {}, -1

    def begin(self, plan: StepPlan) -> StepStates:
        """The states of the step that was planned last, valid until the next call."""
        capacity = plan.capacity.rounded()
        width = self._window + 1
        tables = self._tables.get(capacity, lambda: StepTables(capacity, width, self._device))
        plan.fill(tables)
        if not self._recurrence.wants_order:
            return StepStates(self.layers, tables, partial(self._solve, tables), plan)
        order = torch.from_numpy(np.concatenate([NO_ORDER, *plan.order])).to(self._device)

        def walk(own: LayerStates, values: Tensor, rates: Tensor | None, queries: Tensor) -> Tensor:
            # Of which an order says nothing.
            if plan.fresh:
                own.states[plan.fresh] = 0.0
            return self._solve(order, own, values, rates, queries)

        return StepStates(self.layers, tables, walk, plan)

    def begin_static(self, tables: StepTables) -> StepStates:
        """The states of steps that `tables` describe at run time, for CUDA graphs: each step's plan
        fills them. It copies no states, and the pool must not grow.
        """
        assert not self._recurrence.wants_order
        return StepStates(self.layers, tables, partial(self._solve, tables))

    def static_tables(self, num_rows: int, num_requests: int, num_columns: int) -> StepTables:
        """Tables for `begin_static`, which describe a step of padding at first.

        num_columns  kept rows that the rows see, and as many that texts have passed
        """
        # A tree of all columns has most bits.
        num_bits = num_columns * -(-num_columns // BLOCK)
        capacity = TablesCapacity(
            num_rows, num_requests, 2 * num_columns, num_bits, num_requests * self._window
        )
        tables = StepTables(capacity, self._window + 1, self._device)
        self._new_plan(0).fill(tables)
        return tables

    def _solve(
        self, where: StepTables | Tensor, own: LayerStates, values: Tensor, rates: Tensor | None,
        queries: Tensor,
    ) -> Tensor:  # fmt: skip
        kept = own.states, own.keys, own.log_decays, own.deltas
        return self._recurrence.solve(*kept, values, rates, queries, where)

    def plan(self, step: StepInput) -> StepPlan:
        """Where the step's rows go on from. Each step is planned once, and computed next.

        Raises `StageError` for a request whose states are not those of its text.
        """
        if len(step.state_slots) != len(step.context_lens):
            raise StageError("layers that keep states take steps of an engine alone")
        self._free += self._spent
        self._spent = []
        plan = self._new_plan(len(step.slots))
        moves = step.moves.tolist()
        loads = {to: source for source, to in step.state_loads.tolist()}
        saves = dict(step.state_saves.tolist())
        for request in range(len(step.context_lens)):
            number = int(step.state_slots[request])
            slot = self._slots[number]
            # Rows that are read in this step are given back for the next one.
            held = slot.places
            if (source := loads.get(number)) is not None:
                slot.rows, slot.length = {}, int(step.context_lens[request])
                plan.load(source, self._window_of(source), number, self._window_of(number))
            self._add(plan, step, request, moves)
            self._spent += held - slot.places
            if (to := saves.get(number)) is not None:
                plan.save(number, to, self._window_of(to))
        return plan

    def _new_plan(self, num_rows: int) -> StepPlan:
        by_order = self._recurrence.wants_order
        return StepPlan(num_rows, self._window, self._first_row, by_order=by_order)

    def _add(
        self, plan: StepPlan, step: StepInput, request: int, moves: Sequence[Sequence[int]]
    ) -> None:
        number, context_len = int(step.state_slots[request]), int(step.context_lens[request])
        first, last = step.request_starts[request : request + 2].tolist()
        slot, tree = self._slots[number], step.trees[request]
        window = self._window_of(number)
        begins = context_len == 0 and tree is None
        if begins:
            slot.rows, slot.length = {}, 0
        committed = self._pass(slot, context_len, step.block_tables[request], moves)
        own = self._take(last - first)
        if tree is None:
            plan.add_chunk(number, window, committed, own, first, begins=begins)
            slot.rows = {}
            slot.length += len(own)
            self._spent += own.tolist()
            return
        earlier = tree.slots[: len(tree.slots) - len(own)].tolist()
        columns = [slot.rows[kv_slot][0] for kv_slot in earlier] + own.tolist()
        plan.add_tree(number, window, committed, np.array(columns, dtype=np.int64), tree, first)
        rows = zip(own.tolist(), step.positions[first:last].tolist(), strict=True)
        # Rows that the text has left stay until it is as long as their paths, or others take their
        # KV slots: nodes of a pipelined tree may be on their way yet.
        slot.rows = {at: row for at, row in slot.rows.items() if row[1] > context_len}
        slot.rows |= zip(step.slots[first:last].tolist(), rows, strict=True)

    def _pass(
        self, slot: _Slot, context_len: int, table: Int32, moves: Sequence[Sequence[int]]
    ) -> Int64:
        """Places of the kept rows that the text has passed since the request's last step."""
        if slot.rows:
            slot.rows |= {to: slot.rows[source] for source, to in moves if source in slot.rows}
        if not 0 <= slot.length <= context_len:
            raise StageError("a request's states are not behind its text")
        positions, size = np.arange(slot.length, context_len), self._block_size
        kv_slots = table[positions // size] * size + positions % size
        slot.length = context_len
        try:
            places = [slot.rows[kv_slot][0] for kv_slot in kv_slots.tolist()]
        except KeyError:
            raise StageError("a request's text has tokens that no step computed") from None
        return np.array(places, dtype=np.int64)

    def _window_of(self, slot: int) -> Int64:
        """Where the last inputs of a slot's text are."""
        return np.arange(self._window) + (1 + slot * self._window)

    @property
    def _first_row(self) -> int:
        """Where kept rows begin in a layer's inputs."""
        return 1 + self.num_slots * self._window

    def _take(self, count: int) -> Int64:
        """Places for so many rows."""
        missing = count - len(self._free)
        if missing > 0:
            more = max(missing, self.num_rows // 4)
            for layer in self.layers:
                layer.grow(more)
            self._free += range(self.num_rows, self.num_rows + more)
            self.num_rows += more
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return np.array(taken, dtype=np.int64)


class StepStates:
    """The states of one step, whose layers call it in order, each once."""

    def __init__(
        self, layers: Sequence[LayerStates], tables: StepTables,
        solve: Callable[[LayerStates, Tensor, Tensor | None, Tensor], Tensor],
        plan: StepPlan | None = None,
    ) -> None:  # fmt: skip
        """`solve` takes a layer's values, rates and queries. Without `plan`, a step has all rows of
        the tables, and copies no states.
        """
        self._layers, self._solve = layers, solve
        rows = slice(None) if plan is None else slice(len(plan.places))
        self._taps, self._places = tables.taps[rows], tables.places[rows]
        self._moves_before, self._moves_after = tables.moves_before, tables.moves_after
        self._loads = self._saves = None
        if plan is None or not plan.copies_states:
            return
        # Seldom: copies of a few numbers to a device wait for it.
        self._loads, self._saves = (
            torch.tensor(own, dtype=torch.int64, device=tables.places.device).reshape(-1, 2)
            for own in (plan.loads, plan.saves)
        )

    def convolve(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The short convolution over each row's path, [rows, channels] of inputs [rows, channels].

        `weight` [channels, width], oldest first; `bias` [channels].
        """
        kept = self._layers[layer].inputs
        _move(kept, self._moves_before)
        kept[self._taps[:, -1]] = inputs.to(kept.dtype)
        # Step by step, each number of which is rounded alike wherever its row stands.
        weights = weight.float().t()
        result = kept[self._taps[:, 0]].float() * weights[0]
        for index in range(1, len(weights)):
            result += kept[self._taps[:, index]].float() * weights[index]
        if bias is not None:
            result += bias.float()
        _move(kept, self._moves_after)
        return result.to(inputs.dtype)

    def scan(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, log_decays: Tensor,
        rates: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Outputs of the recurrence over each row's path, float32 [rows, heads, value_dim].

        queries, keys  [rows, key_heads, key_dim]
        values         [rows, heads, value_dim]
        log_decays     [rows, heads, 1 or key_dim]
        rates          [rows, heads]; None: what a token adds is its value, as in Mamba-2
        """
        own = self._layers[layer]
        own.keys[self._places] = keys.float()
        own.log_decays[self._places] = log_decays.float()
        _copy(own.states, self._loads)
        values, queries = values.float().contiguous(), queries.float().contiguous()
        rates = None if rates is None else rates.float().contiguous()
        outputs = self._solve(own, values, rates, queries)
        _copy(own.states, self._saves)
        return outputs


def _copy(states: Tensor, pairs: Tensor | None) -> None:
    if pairs is not None:
        states[pairs[:, 1]] = states[pairs[:, 0]]


def _move(inputs: Tensor, moves: Tensor) -> None:
    to, source = moves
    inputs[to] = inputs[source]


_STATES: ContextVar[StepStates] = ContextVar("draftline_states")


@contextmanager
def keeping(states: StepStates | None) -> Iterator[None]:
    """A context in which transformers' layers keep states in those of a step; None: none does."""
    if states is None:
        yield
        return
    token = _STATES.set(states)
    try:
        yield
    finally:
        _STATES.reset(token)


def current_states() -> StepStates:
    """Those of the step that this thread computes."""
    return _STATES.get()
