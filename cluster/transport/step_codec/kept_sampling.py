"""Sampling parameters by request slot, on both ends of a message."""

from __future__ import annotations

import numpy as np

from ....core.arrays import Float32, Int32, Int64
from ....core.compiled import compiled
from ....core.steps import SamplingRows
from .step_difference import RowsDifference, SamplingChanges
from .typed_array import expect, expect_flat, typed

NONE = np.empty(0, dtype=np.int32)
NO_FLOATS = np.empty(0, dtype=np.float32)
# In the order of `SamplingChanges.floats`.
FLOATS = ("temperature", "top_p", "min_p", "typical_p")
NO_SEEDS = np.empty(0, dtype=np.int64)


class KeptSampling:
    """Parameters of the request in each slot, zeros at first.

    Either `changes` or `apply` is called on an end.
    """

    __slots__ = ("_floats", "_seeds", "_top_k")

    def __init__(self) -> None:
        self._floats = np.zeros((0, 4), dtype=np.float32)
        self._top_k = np.zeros(0, dtype=np.int32)
        self._seeds = np.zeros(0, dtype=np.int64)

    def changes(
        self, rows: RowsDifference, logits_rows: Int32, sampling: SamplingRows
    ) -> SamplingChanges | None:
        """What differs in the parameters of these rows; kept from now on. None: nothing.

        Raises `TypeError` for arrays that no step has.
        """
        floats, top_k, seeds, positions = _columns(sampling, len(logits_rows))
        starts, slots = rows.request_starts, rows.request_slots
        is_regular, is_behind = _regular(
            starts, logits_rows, rows.positions, floats.view(np.int32), top_k, seeds, positions
        )
        if not is_regular:
            return SamplingChanges(NONE, NO_FLOATS, NONE, NO_SEEDS, None, sampling)
        self._make_room(slots)
        kept = self._floats.view(np.int32), self._top_k, self._seeds
        places = _changes(starts, slots, logits_rows, floats.view(np.int32), top_k, seeds, *kept)
        if is_behind and not len(places):
            return None
        changed = slots[places]
        return SamplingChanges(
            places,
            self._floats[changed].ravel(),
            self._top_k[changed],
            self._seeds[changed],
            None if is_behind else positions,
            None,
        )

    def apply(
        self, rows: RowsDifference, logits_rows: Int32, changes: SamplingChanges | None
    ) -> SamplingRows:
        """The parameters that the other end's `changes` was given.

        `rows` and `logits_rows` were checked to be of one step. Raises `ProtocolError` for what
        the other end cannot have made.
        """
        slots, positions = rows.request_slots, None
        self._make_room(slots)
        if changes is not None:
            if changes.rows is not None:
                return changes.rows
            self._keep(slots, changes)
            positions = changes.positions
        owners = rows.slots_of(logits_rows)
        temperature, top_p, min_p, typical_p = np.ascontiguousarray(self._floats[owners].T)
        if positions is None:
            positions = rows.positions[logits_rows].astype(np.int64) + 1
        expect(positions.shape == logits_rows.shape, "positions are of other rows")
        return SamplingRows(
            temperature, self._top_k[owners], top_p, min_p, typical_p,
            self._seeds[owners], positions,
        )  # fmt: skip

    def _keep(self, slots: Int32, changes: SamplingChanges) -> None:
        places, count = changes.places, len(changes.places)
        expect_flat("sampling", places, changes.floats, changes.top_k, changes.seeds)
        is_whole = len(changes.floats) == 4 * count
        is_whole &= len(changes.top_k) == len(changes.seeds) == count
        expect(is_whole, "sampling parameters are cut short")
        if count:
            fits = places.min() >= 0 and places.max() < len(slots)
            expect(fits, "sampling parameters are of no request")
        changed = slots[places]
        self._floats[changed] = changes.floats.reshape(-1, 4)
        self._top_k[changed], self._seeds[changed] = changes.top_k, changes.seeds

    def _make_room(self, slots: Int32) -> None:
        missing = max(slots.tolist(), default=-1) + 1 - len(self._seeds)
        if missing > 0:
            self._floats = np.concatenate((self._floats, np.zeros((missing, 4), np.float32)))
            self._top_k = np.concatenate((self._top_k, np.zeros(missing, np.int32)))
            self._seeds = np.concatenate((self._seeds, np.zeros(missing, np.int64)))


def _columns(sampling: SamplingRows, count: int) -> tuple[Float32, Int32, Int64, Int64]:
    """float32 [rows, 4] as `SamplingChanges.floats`, top_k, seeds and positions."""
    columns = [typed(getattr(sampling, name), np.float32, 1, name) for name in FLOATS]
    top_k = typed(sampling.top_k, np.int32, 1, "top_k")
    seeds = typed(sampling.seed, np.int64, 1, "seed")
    positions = typed(sampling.position, np.int64, 1, "position")
    if any(len(column) != count for column in (*columns, top_k, seeds, positions)):
        raise TypeError("sampling parameters are of other rows")
    floats = np.empty((count, 4), dtype=np.float32)
    for index, column in enumerate(columns):
        floats[:, index] = column
    return floats, top_k, seeds, positions


@compiled
def _regular(  # noqa: PLR0913, PLR0917 - flat arrays, and one loop over them
    starts: Int32,
    logits_rows: Int32,
    row_positions: Int32,
    floats: Int32,
    top_k: Int32,
    seeds: Int64,
    positions: Int64,
) -> tuple[bool, bool]:
    """Whether rows go from request to request, all of one alike; whether all positions follow."""
    request, first, is_behind = -1, 0, True
    for index in range(len(logits_rows)):
        row = logits_rows[index]
        if request < 0 or row >= starts[request + 1]:
            request, first = max(request, 0), index
            while row >= starts[request + 1]:
                request += 1
        if row < starts[request]:
            return False, False
        for column in range(4):
            if floats[index, column] != floats[first, column]:
                return False, False
        if top_k[index] != top_k[first] or seeds[index] != seeds[first]:
            return False, False
        is_behind &= positions[index] == np.int64(row_positions[row]) + 1
    return True, is_behind


@compiled
def _changes(  # noqa: PLR0913, PLR0917 - flat arrays, and one loop over them
    starts: Int32,
    slots: Int32,
    logits_rows: Int32,
    floats: Int32,
    top_k: Int32,
    seeds: Int64,
    kept_floats: Int32,
    kept_top_k: Int32,
    kept_seeds: Int64,
) -> Int32:
    """Keep every request's parameters; the places of those that were others. Rows are regular."""
    places = np.empty(len(slots), dtype=np.int32)
    count, request = 0, -1
    for index in range(len(logits_rows)):
        row = logits_rows[index]
        if request >= 0 and row < starts[request + 1]:
            continue
        request = max(request, 0)
        while row >= starts[request + 1]:
            request += 1
        slot = slots[request]
        is_new = kept_top_k[slot] != top_k[index] or kept_seeds[slot] != seeds[index]
        for column in range(4):
            is_new |= kept_floats[slot, column] != floats[index, column]
            kept_floats[slot, column] = floats[index, column]
        kept_top_k[slot], kept_seeds[slot] = top_k[index], seeds[index]
        if is_new:
            places[count] = request
            count += 1
    return places[:count].copy()
