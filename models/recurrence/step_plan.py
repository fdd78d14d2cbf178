"""Where each row of a step goes on from, for layers that keep states. Computed once for all layers.

Rows are kept in places of their own until the text has passed them or left them. A place is an
index into a layer's kept rows (`state_pool.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.arrays import Bool, Int32, Int64, UInt64
from ...core.compiled import compiled
from ...core.steps import WORD_BITS, TreeRows
from ...kernels.recurrence.step_tables import RequestRows, StepTables, TablesCapacity

# A row of zeros among the inputs, which stands before every text.
ZEROS = 0


class StepPlan:
    """The rows of a step, request by request, for what computes the recurrence.

    requests  those that were added, for what solves trees; or
    order     int32 [m, 4] each, as `walk` takes them, and
    fresh     slots whose texts begin
    places    int64 [rows]  where each row is kept
    before    int64 [rows, w]  where the inputs before each row's are, oldest first
    loads, saves  copies between slots, from and to: before the rows, and behind them
    moves_before, moves_after  of inputs, before the rows' are there and behind them: pairs of int64
              [n], to and from. All are read before any is written
    """

    def __init__(self, num_rows: int, window: int, first_row: int, *, by_order: bool) -> None:
        """`first_row`: where kept rows begin among the inputs."""
        self.first_row, self._by_order = first_row, by_order
        self.requests: list[RequestRows] = []
        self.order: list[Int32] = []
        self.fresh: list[int] = []
        self.places = np.zeros(num_rows, dtype=np.int64)
        self.before = np.zeros((num_rows, window), dtype=np.int64)
        self.loads: list[tuple[int, int]] = []
        self.saves: list[tuple[int, int]] = []
        self.moves_before: list[tuple[Int64, Int64]] = []
        self.moves_after: list[tuple[Int64, Int64]] = []

    def load(self, source: int, source_window: Int64, slot: int, window: Int64) -> None:
        """A text goes on from the state of another slot."""
        self.loads.append((source, slot))
        self.moves_before.append((window, source_window))

    def save(self, slot: int, to: int, to_window: Int64) -> None:
        """The state behind the slot's chunk, the last one that was added, is copied."""
        _, inputs = self.moves_after[-1]
        self.saves.append((slot, to))
        self.moves_after.append((to_window, inputs))

    def add_chunk(
        self,
        slot: int,
        window: Int64,
        committed: Int64,
        own: Int64,
        first: int,
        *,
        begins: bool = False,
    ) -> None:
        """Rows kept at `own`, int64 [n], the next of the text, or its first ones.

        window  int64 [w]  where the slot's last inputs are
        """
        if begins:
            self.fresh.append(slot)
            self.moves_before.append((window, np.full_like(window, ZEROS)))
        self._pass(slot, window, committed)
        rows = slice(first, first + len(own))
        self._in_place(slot, own, np.arange(first, first + len(own)))
        inputs = np.concatenate([window, own + self.first_row])
        self.places[rows] = own
        for index in range(len(window)):
            self.before[rows, index] = inputs[index : index + len(own)]
        self.moves_after.append((window, inputs[len(own) :]))
        self._add(RequestRows(slot, committed, own, None, rows, begins))

    def add_tree(
        self,
        slot: int,
        window: Int64,
        committed: Int64,
        columns: Int64,
        tree: TreeRows,
        first: int,
    ) -> None:
        """Rows of a tree whose columns are kept at `columns`."""
        self._pass(slot, window, committed)
        order, before, sees = plan_tree(
            tree.ancestors, tree.positions, columns, window, first, -1 - slot, self.first_row
        )
        rows = slice(first, first + len(before))
        if self._by_order:
            self.order.append(order)
        self.places[rows] = columns[len(columns) - len(before) :]
        self.before[rows] = before
        self._add(RequestRows(slot, committed, columns, sees, rows))

    @property
    def capacity(self) -> TablesCapacity:
        """The least that holds the step."""
        moves = max(sum(len(to) for to, _ in own) for own in (self.moves_before, self.moves_after))
        return TablesCapacity.exact(len(self.places), self.requests, moves)

    @property
    def copies_states(self) -> bool:
        """Whether states are copied, which no tables describe."""
        return bool(self.loads or self.saves)

    def fill(self, tables: StepTables) -> None:
        """Describe the step in tables that hold it."""
        taps = np.column_stack([self.before, self.places + self.first_row])
        spare = np.full(taps.shape[1], ZEROS)
        spare[-1] = self.first_row
        moves = [_joined(own) for own in (self.moves_before, self.moves_after)]
        tables.refill(self.requests, self.places, taps, spare, moves)

    def _pass(self, slot: int, window: Int64, committed: Int64) -> None:
        if len(committed):
            self._in_place(slot, committed, np.full_like(committed, -1))
            inputs = np.concatenate([window, committed + self.first_row])
            self.moves_before.append((window, inputs[len(committed) :]))

    def _add(self, request: RequestRows) -> None:
        if not self._by_order:
            self.requests.append(request)

    def _in_place(self, slot: int, kept: Int64, own: Int64) -> None:
        if not self._by_order:
            return
        context = np.full_like(kept, -1 - slot)
        self.order.append(np.column_stack([kept, own, context, context]).astype(np.int32))


def _joined(moves: Sequence[tuple[Int64, Int64]]) -> tuple[Int64, Int64]:
    """All targets, and all sources."""
    none = np.empty(0, dtype=np.int64)
    return (
        np.concatenate([none, *(to for to, _ in moves)]),
        np.concatenate([none, *(source for _, source in moves)]),
    )


@compiled
def plan_tree(
    ancestors: UInt64,
    positions: Int32,
    places: Int64,
    windows: Int64,
    first_row: int,
    context: int,
    offset: int,
) -> tuple[Int32, Int64, Bool]:
    """The order of a tree's rows, and what each goes on from.

    ancestors, positions  as in `TreeRows`
    places     int64 [columns]  kept rows
    windows    int64 [w]  where the context's last inputs are, oldest first
    first_row  of the request in the step
    context    source of nodes that go on from the context
    offset     of kept rows among all inputs

    Gives the order (`walk`), int32 [m, 4]; where the w inputs before each own row's are, int64
    [rows, w], oldest first; and what each column sees, bool [columns, columns]. Columns of earlier
    steps that no row sees are left out.
    """
    num_columns, num_rows = len(positions), len(ancestors)
    num_before = num_columns - num_rows
    # -2: not seen.
    parents = np.full(num_columns, -2, dtype=np.int32)
    visible = np.zeros(num_columns, dtype=np.bool_)
    for row in range(num_rows):
        for column in range(num_columns):
            word = ancestors[row, column // WORD_BITS]
            visible[column] = (word >> np.uint64(column % WORD_BITS)) & np.uint64(1)
        for column in range(num_columns):
            is_own = column == num_before + row
            if is_own or (column < num_before and visible[column] and parents[column] == -2):
                parents[column] = _parent(column, visible, positions)
    order = _depth_first(parents)
    steps = np.empty((len(order), 4), dtype=np.int32)
    sees = np.zeros((num_columns, num_columns), dtype=np.bool_)
    before = np.empty((num_rows, len(windows)), dtype=np.int64)
    for place in range(len(order)):
        column, source, target = order[place]
        own = column - num_before
        steps[place, 0] = places[column]
        steps[place, 1] = first_row + own if own >= 0 else -1
        steps[place, 2] = source if source >= 0 else context
        steps[place, 3] = target
        parent = parents[column]
        if parent >= 0:
            sees[column] = sees[parent]
        sees[column, column] = True
        if own >= 0:
            left = len(windows)
            while left and parent >= 0:
                left -= 1
                before[own, left] = places[parent] + offset
                parent = parents[parent]
            for index in range(left):
                before[own, index] = windows[len(windows) - left + index]
    return steps, before, sees


@compiled
def _parent(column: int, visible: Bool, positions: Int32) -> int:
    """The last of the visible columns before this one; -1: none."""
    found = -1
    for other in range(len(positions)):
        is_before = visible[other] and positions[other] < positions[column]
        if is_before and (found < 0 or positions[other] >= positions[found]):
            found = other
    return found


@compiled
def _depth_first(parents: Int32) -> Int32:
    """Columns with the buffers that their parents' and their own states are in, int32 [m, 3].
    The last child of a node goes on in its buffer; -1 is the context's.
    """
    count = len(parents)
    # The root of all comes last.
    first_child = np.full(count + 1, -1, dtype=np.int32)
    sibling = np.full(count, -1, dtype=np.int32)
    for column in range(count - 1, -1, -1):
        if parents[column] >= -1:
            sibling[column] = first_child[parents[column]]
            first_child[parents[column]] = column
    order = np.empty((count, 3), dtype=np.int32)
    buffers = np.full(count + 1, -1, dtype=np.int32)
    free, stack = np.empty(count, dtype=np.int32), np.empty(count + 1, dtype=np.int32)
    num_free = num_buffers = done = depth = 0
    if first_child[-1] >= 0:
        stack[0], depth = first_child[-1], 1
    while depth:
        column = stack[depth - 1]
        parent = parents[column]
        if sibling[column] >= 0:
            stack[depth - 1] = sibling[column]
        else:
            depth -= 1
        source = buffers[parent]
        if parent >= 0 and sibling[column] < 0:
            target = source
        elif num_free:
            num_free -= 1
            target = free[num_free]
        else:
            target = num_buffers
            num_buffers += 1
        buffers[column] = target
        order[done, 0], order[done, 1], order[done, 2] = column, source, target
        done += 1
        if first_child[column] >= 0:
            stack[depth] = first_child[column]
            depth += 1
        else:
            free[num_free] = target
            num_free += 1
    return order[:done]


def load_plans() -> None:
    """Compile the loops, or load them, so that no step waits for it."""
    ancestors, index = np.array([[1], [3]], dtype=np.uint64), np.arange(2, dtype=np.int64)
    plan_tree(ancestors, index.astype(np.int32), index, index[:1], 0, -1, 2)
