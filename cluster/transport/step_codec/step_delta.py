"""What travels to a stage in place of a whole `StepInput`, and checks of its arrays.

Both ends keep tables by request slot and change them alike, so a message holds only what differs.
Fields without a note are those of `StepInput`. Places count the step's requests, from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ....core.arrays import Bool, Float32, Float64, Int32, Int64, UInt32, UInt64
from ....core.errors import ProtocolError
from ....core.steps import HeadInput, LogProbInput, ProbeInput, SamplingRows, Verification

# In `EditChanges.heads`: what is kept counts; there is none.
AS_KEPT = NONE = -1
# In `TreeArrays.shapes`.
NO_TREE = (-1, 0)


@dataclass(frozen=True, slots=True, eq=False)
class TableChanges:
    """Entries of block tables that differ from those kept in the requests' slots.

    width   columns of the step's tables
    spans   int32 [2, requests]  first column of each request that differs, and how many columns
            from there on are sent
    blocks  int32 [all of these]
    """

    width: int
    spans: Int32
    blocks: Int32


@dataclass(frozen=True, slots=True, eq=False)
class TreeColumns:
    """Columns of all trees.

    counts            int32 [trees]
    slots, positions  int32 [all columns]
    """

    counts: Int32
    slots: Int32
    positions: Int32


@dataclass(frozen=True, slots=True, eq=False)
class TreeArrays:
    """The `TreeRows` of all requests, one behind the other.

    shapes     int32 [requests, 2]  of each one's ancestors; -1 rows: it has no tree
    ancestors  uint64 [all words]
    columns    None where every tree's columns are its own rows
    """

    shapes: Int32
    ancestors: UInt64
    columns: TreeColumns | None


@dataclass(frozen=True, slots=True, eq=False)
class RowsDelta:
    """What every stage needs of a step.

    request_slots  int32 [requests]  where each request's tables are kept
    trees          None: no request has one
    """

    step_id: int
    is_traced: bool
    moves: Int32
    token_ids: Int32
    positions: Int32
    slots: Int32
    request_starts: Int32
    context_lens: Int32
    request_slots: Int32
    tables: TableChanges
    trees: TreeArrays | None

    def slots_of(self, rows: Int32) -> Int32:
        """The request slot of each of these rows, int32 [len(rows)]."""
        return self.request_slots[self.request_starts.searchsorted(rows, side="right") - 1]


@dataclass(frozen=True, slots=True, eq=False)
class SamplingChanges:
    """Sampling parameters of the requests whose kept ones differ.

    places     int32 [changed]  these requests
    floats     float32 [4 * changed]  temperature, top_p, min_p and typical_p of each
    top_k      int32 [changed]
    seeds      int64 [changed]
    positions  int64 [rows]; None: each is the one behind its row's
    rows       all of it as it is, where rows of one request differ or go back and forth between
               requests; nothing is kept then
    """

    places: Int32
    floats: Float32
    top_k: Int32
    seeds: Int64
    positions: Int64 | None
    rows: SamplingRows | None


@dataclass(frozen=True, slots=True, eq=False)
class MaskChanges:
    """Token masks by number; rows that were sent before are not sent again.

    num_words  of a mask
    ids        int32 [rows of all masks]
    new_ids    int32 [n]  the masks that come with this message
    new_masks  uint32 [n, num_words]
    """

    num_words: int
    ids: Int32
    new_ids: Int32
    new_masks: UInt32


@dataclass(frozen=True, slots=True, eq=False)
class EditChanges:
    """Changes to logits, against what is kept in the slot of the request of the first row.

    heads         int32 [edits, 9]  `first_row`, `num_rows`; number of biases, -1: those kept;
                  number of tokens of the penalties, -1: none; how many of these, from the first on,
                  are those kept; how many of those have another count; number of path entries; rows
                  of the mask, -1: none; whether the factors are others
    bias_tokens   int32 [biases], bias float32 [biases]
    factors       float64 [3 * those that changed]  repetition, presence, frequency
    count_places  int32  among the tokens that are as before, those whose counts differ
    tokens        int32  behind those that are as before
    counts        int32  at `count_places`, edit by edit, each followed by those of its `tokens`
    in_prompt     bool   likewise
    path_rows, path_tokens  int32 [path entries]
    masks         None: there are none
    """

    heads: Int32
    bias_tokens: Int32
    bias: Float32
    factors: Float64
    count_places: Int32
    tokens: Int32
    counts: Int32
    in_prompt: Bool
    path_rows: Int32
    path_tokens: Int32
    masks: MaskChanges | None


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceDelta:
    """What the last stage alone needs of a step.

    sampling  None: the kept parameters, and each row's position is the one behind its own
    log_probs, probes, heads  None: the step wants none
    request_keys  of all requests, where heads have tasks; else none
    """

    logits_rows: Int32
    sampling: SamplingChanges | None
    edits: EditChanges | None
    verification: Verification | None
    log_probs: LogProbInput | None
    probes: ProbeInput | None
    heads: HeadInput | None
    request_keys: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepDelta:
    """One step against the one before it.

    epoch   names the run of the stages that the sender speaks to
    serial  number of the message in the epoch; before number 0 nothing is kept
    choice  None for stages before the last
    """

    epoch: int
    serial: int
    rows: RowsDelta
    choice: ChoiceDelta | None


def are_starts(starts: Int32, num_requests: int, num_rows: int) -> bool:
    """Whether all of so many rows belong to so many requests, in order."""
    if starts.ndim != 1 or len(starts) != num_requests + 1:
        return False
    return bool(starts[0] == 0 and starts[-1] == num_rows and (starts[1:] >= starts[:-1]).all())


def typed(array: NDArray[Any], dtype: DTypeLike, num_dims: int, name: str) -> NDArray[Any]:
    """The array, contiguous. Raises `TypeError` for one of another type or shape."""
    if array.dtype != dtype or array.ndim != num_dims:
        raise TypeError(f"{name} is {array.dtype} of {array.ndim} dimensions")
    return np.ascontiguousarray(array)


def expect(condition: bool | np.bool_, what: str) -> None:
    """Raise `ProtocolError` unless the message keeps this."""
    if not condition:
        raise ProtocolError(f"not a message between stages: {what}")


def expect_flat(name: str, *arrays: NDArray[Any]) -> None:
    """Raise `ProtocolError` unless all arrays have one dimension."""
    for array in arrays:
        expect(array.ndim == 1, f"{name} are no flat arrays")


def ends_of(lengths: Int32, total: int, name: str) -> list[int]:
    """Where parts of these lengths end in an array of `total` entries, which they fill.

    Raises `ProtocolError` where they do not.
    """
    own = lengths.tolist()
    expect(min(own, default=0) >= 0, f"{name} have lengths below 0")
    ends = list(accumulate(own))
    expect((ends[-1] if ends else 0) == total, f"{name} are cut short or too many")
    return ends
