"""What travels to a stage in place of a whole `StepInput`, what both ends cache, and checks.

Both ends keep tables by request slot and change them alike, so a message holds only what differs.
Fields without a note are those of `StepInput`. Places count the step's requests, from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ....core.arrays import Bool, Float32, Float64, Int32, UInt32, UInt64
from ....core.errors import ProtocolError
from ....core.steps import HeadInput, LogProbInput, ProbeInput, SamplingRows, Verification

# In `EditChanges.heads`: what is kept counts; there is none.
AS_KEPT = NONE = -1
# In `TreeArrays.shapes`.
NO_TREE = (-1, 0)
# Entries of the largest block tables that are kept: half a gigabyte.
MAX_ENTRIES = 1 << 27
# Entries that are compared at once.
CHUNK = 64
NO_INTS = np.empty(0, dtype=np.int32)
NO_FLOATS = np.empty(0, dtype=np.float32)
# Tokens and token masks that there is room for at first.
FIRST_ROOM = 256
FIRST_MASKS = 64


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
    state_slots    int32 [requests], or none
    state_loads, state_saves  of slots in `state_slots`, and of others
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
    state_slots: Int32
    state_loads: Int32
    state_saves: Int32
    tables: TableChanges
    trees: TreeArrays | None

    def slots_of(self, rows: Int32) -> Int32:
        """The request slot of each of these rows, int32 [len(rows)]."""
        return self.request_slots[self.request_starts.searchsorted(rows, side="right") - 1]


@dataclass(frozen=True, slots=True, eq=False)
class MaskChanges:
    """Token masks by number; rows that were sent before are not sent again.

    num_words  of a mask
    ids        int32 [rows of all masks]
    first      number of the first of the masks that come with this message
    new_masks  uint32 [n, num_words]
    """

    num_words: int
    ids: Int32
    first: int
    new_masks: UInt32


@dataclass(frozen=True, slots=True, eq=False)
class EditChanges:
    """Changes to logits, against what is kept in the slot of the request of the first row.

    heads         int32 [edits, 8]  `first_row`, `num_rows`; number of biases, -1: those kept;
                  number of tokens of the penalties, -1: none; how many of these, from the first on,
                  are those kept; how many of those have another count; number of path entries; rows
                  of the mask, -1: none
    bias_tokens   int32 [biases], bias float32 [biases]
    factors       float64 [edits with penalties, 3]  repetition, presence, frequency
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

    log_probs, probes, heads  None: the step wants none
    request_keys  of all requests, where heads have tasks; else none
    """

    logits_rows: Int32
    sampling: SamplingRows
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


class CachedEdits:
    """What one end knows of the biases and the penalties of the request in one slot.

    num_tokens  so many of `tokens`, `counts` and `in_prompt` are in use
    """

    __slots__ = ("bias", "bias_tokens", "counts", "in_prompt", "num_tokens", "tokens")

    def __init__(self) -> None:
        self.bias_tokens, self.bias = NO_INTS, NO_FLOATS
        self.num_tokens = 0
        self.tokens = np.zeros(FIRST_ROOM, dtype=np.int32)
        self.counts = np.zeros(FIRST_ROOM, dtype=np.int32)
        self.in_prompt = np.zeros(FIRST_ROOM, dtype=np.bool_)

    def put_tail(self, first: int, tokens: Int32, counts: Int32, in_prompt: Bool) -> None:
        """Put these behind the first ones, which stay."""
        end = first + len(tokens)
        if end > len(self.tokens):
            room = 2 * end
            self.tokens, self.counts = np.resize(self.tokens, room), np.resize(self.counts, room)
            self.in_prompt = np.resize(self.in_prompt, room)
        self.tokens[first:end] = tokens
        self.counts[first:end] = counts
        self.in_prompt[first:end] = in_prompt
        self.num_tokens = end

    @property
    def text(self) -> tuple[Int32, Int32, Bool]:
        """What is in use of `tokens`, `counts` and `in_prompt`."""
        count = self.num_tokens
        return self.tokens[:count], self.counts[:count], self.in_prompt[:count]


def with_columns(kept: Int32, slots: Int32, width: int) -> Int32:
    """Block tables int32 [slots, columns], with rows and columns of zeros where more are needed."""
    num_slots, num_columns = kept.shape
    needed = max(slots.tolist(), default=-1) + 1
    if needed <= num_slots and width <= num_columns:
        return kept
    # By a quarter more, since contexts grow block by block.
    if width > num_columns:
        num_columns = width + width // 4 + CHUNK
    grown = np.zeros((max(needed, num_slots), num_columns), dtype=np.int32)
    grown[: kept.shape[0], : kept.shape[1]] = kept
    return grown


def with_room(masks: UInt32, count: int) -> UInt32:
    """Token masks, with rows of zeros up to `count` of them, or more."""
    if count <= len(masks):
        return masks
    grown = np.zeros((max(count, 2 * len(masks), FIRST_MASKS), masks.shape[1]), dtype=np.uint32)
    grown[: len(masks)] = masks
    return grown


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
