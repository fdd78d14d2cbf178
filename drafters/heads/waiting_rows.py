"""What a head of the last stage knows of the token in each KV slot.

It has read it, its features wait to be read, or nothing is known. All is kept by slot, in arrays
that are made once: so nothing is left of a request that has ended but what the slots of a shared
prefix hold, and a step costs one indexed copy, however many requests it has. The loops take

states  int32 [slots]   READ, UNKNOWN, or the place where the features of its token wait
owners  int32 [places]  the slot of each place, -1 where nothing waits; the states' inverse
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Bool, Int32
from ...core.compiled import compiled
from ...core.step.builder import kv_slot
from ...core.steps import StepInput
from ...models.device import to_device
from ...models.stage.stage_heads import TextRows

READ, UNKNOWN = -1, -2
# Rows that are read late for a request, and that wait for all of them together. Older ones are let
# go: the head then drafts from what it knows.
MOST_ROWS, MOST_ROWS_OF_ALL = 256, 4096


@compiled
def set_states(states: Int32, owners: Int32, slots: Int32, state: int) -> None:
    """Slots int32 [n] are READ or UNKNOWN now; nothing of them waits any more."""
    for slot in slots:
        if states[slot] >= 0:
            owners[states[slot]] = -1
        states[slot] = state


@compiled
def move_states(states: Int32, owners: Int32, moves: Int32) -> None:
    """Slots int32 [m, 2] (from, to) were copied, all read before one was written.

    What waits goes along: it has one owner.
    """
    moved = np.empty(len(moves), dtype=np.int32)
    for index in range(len(moves)):
        source = moves[index, 0]
        moved[index] = states[source]
        if moved[index] >= 0:
            states[source] = UNKNOWN
    for index in range(len(moves)):
        target = moves[index, 1]
        if states[target] >= 0:
            owners[states[target]] = -1
        states[target] = moved[index]
        if moved[index] >= 0:
            owners[moved[index]] = target


@compiled
def take_places(states: Int32, owners: Int32, first: int, slots: Int32) -> Int32:
    """Places int32 [n] for the features of slots int32 [n], from place `first` on; who waited there
    is let go. A slot that comes twice has the last one. At most as many slots as places."""
    places = np.empty(len(slots), dtype=np.int32)
    for index in range(len(slots)):
        place, slot = (first + index) % len(owners), slots[index]
        if owners[place] >= 0:
            states[owners[place]] = UNKNOWN
        if states[slot] >= 0:
            owners[states[slot]] = -1
        places[index] = states[slot] = place
        owners[place] = slot
    return places


@compiled
def newest_rows(starts: Int32, is_wanted: Bool, most: int) -> Int32:
    """int32 [n]: the last rows, at most `most`, of each request that is not wanted; the rows of
    request r are starts[r]:starts[r+1]."""
    rows = np.empty(starts[-1], dtype=np.int32)
    count = 0
    for request in range(len(is_wanted)):
        if not is_wanted[request]:
            for row in range(max(starts[request], starts[request + 1] - most), starts[request + 1]):
                rows[count] = row
                count += 1
    return rows[:count]


@compiled
def lay_out_texts(  # noqa: PLR0913, PLR0917 - flat arrays, and one loop over them
    states: Int32,
    ring_following: Int32,
    tables: Int32,
    ends: Int32,
    requests: Int32,
    starts: Int32,
    slots: Int32,
    positions: Int32,
    following: Int32,
    block_size: int,
    max_tokens: int,
    most_late: int,
) -> tuple[Int32, Int32, Int32, Int32, Int32, Int32]:
    """The fields of `TextsToRead` of requests int32 [texts].

    ring_following  int32 [places]  the tokens behind those whose features wait
    tables, ends    block tables and context lengths of the step's requests
    starts, slots, positions, following  of the rows that come now, as in `TextRows`
    max_tokens      of a context that are looked at, the last ones
    most_late       of what waits of a text that is read, the last ones
    """
    size = 0
    for request in requests:
        size += min(ends[request], max_tokens) + starts[request + 1] - starts[request]
    placed, read = np.empty(size, dtype=np.int32), np.empty((3, size), dtype=np.int32)
    text_starts = np.zeros(len(requests) + 1, dtype=np.int32)
    num_known = np.empty(len(requests), dtype=np.int32)
    count, num_read = 0, 0
    for text in range(len(requests)):
        request, first_read = requests[text], num_read
        table, end = tables[request], int(ends[request])
        count, after = _known(states, table, end, block_size, max_tokens, placed, count)
        num_known[text] = count - text_starts[text]
        skipped = _num_waiting(states, table, after, end, block_size) - most_late
        for position in range(after, end):
            slot = kv_slot(table, position, block_size)
            if states[slot] >= 0:
                skipped -= 1
                if skipped < 0:
                    placed[count + num_read - first_read] = slot
                    read[0, num_read] = states[slot]
                    read[1, num_read] = ring_following[states[slot]]
                    read[2, num_read] = position
                    num_read += 1
        for row in range(starts[request], starts[request + 1]):
            placed[count + num_read - first_read] = slots[row]
            read[0, num_read] = -1 - row
            read[1, num_read], read[2, num_read] = following[row], positions[row]
            num_read += 1
        count += num_read - first_read
        text_starts[text + 1] = count
    sources, behind, where = read[0, :num_read], read[1, :num_read], read[2, :num_read]
    return placed[:count], text_starts, num_known, sources, behind, where


@compiled
def _known(
    states: Int32,
    table: Int32,
    end: int,
    block_size: int,
    max_tokens: int,
    placed: Int32,
    count: int,
) -> tuple[int, int]:
    """Place a text's slots that were read behind `count` others: how many there are then, and the
    position behind the last of them."""
    after = max(0, end - max_tokens)
    for position in range(after, end):
        slot = kv_slot(table, position, block_size)
        if states[slot] == READ:
            placed[count] = slot
            count += 1
            after = position + 1
    return count, after


@compiled
def _num_waiting(states: Int32, table: Int32, first: int, end: int, block_size: int) -> int:
    count = 0
    for position in range(first, end):
        count += states[kv_slot(table, position, block_size)] >= 0
    return count


class TextsToRead(NamedTuple):
    """What a head reads of several texts, and what it knows of them already.

    slots      int32 [n]  of each text those of rows that are known, then of those that are read
    starts     int32 [texts + 1]  of each text in `slots`
    num_known  int32 [texts]
    sources    int32 [rows read]  where the features are: the place where they wait, or, below 0,
               -1 - row of those that come now
    following  int32 [rows read]  the tokens behind their own
    positions  int32 [rows read]  rising in each text
    """

    slots: Int32
    starts: Int32
    num_known: Int32
    sources: Int32
    following: Int32
    positions: Int32

    @property
    def counts(self) -> Int32:
        """int32 [texts]: rows of each that are read."""
        return self.starts[1:] - self.starts[:-1] - self.num_known

    @property
    def read_slots(self) -> Int32:
        """int32 [rows read]"""
        firsts = self.starts[:-1] + self.num_known
        places = np.arange(len(self.slots), dtype=np.int32)
        return self.slots[places >= firsts.repeat(self.starts[1:] - self.starts[:-1])]


class WaitingRows:
    """Features that were not read, in a ring: the oldest of all are let go first."""

    def __init__(self, num_slots: int, like: Tensor) -> None:
        """`like`: of the dtype, width and device of features, [.., width]."""
        self._states = np.full(num_slots, UNKNOWN, dtype=np.int32)
        # By place in the ring: the slot, -1 where none waits, and the token behind its own.
        self._owners = np.full(MOST_ROWS_OF_ALL, -1, dtype=np.int32)
        self._following = np.zeros(MOST_ROWS_OF_ALL, dtype=np.int32)
        self._features = like.new_zeros(MOST_ROWS_OF_ALL, like.shape[-1])
        self._next = 0

    def clear(self) -> None:
        """Nothing is known of any slot."""
        self._states[:] = UNKNOWN
        self._owners[:] = -1

    def move(self, moves: Int32) -> None:
        """Slots, int32 [m, 2] (from, to), were copied; all were read first."""
        move_states(self._states, self._owners, moves)

    def overwritten(self, slots: Int32) -> None:
        """Nothing is known of these slots, int32 [n], any more."""
        set_states(self._states, self._owners, slots, UNKNOWN)

    def note_read(self, slots: Int32) -> None:
        """Those that stand in these slots were read."""
        set_states(self._states, self._owners, slots, READ)

    def add(self, texts: TextRows, features: Tensor, is_wanted: Bool) -> None:
        """Keep the newest rows of the requests that are not `is_wanted`, bool [requests].

        features  [rows, width]  of all rows of `texts`
        """
        rows = newest_rows(texts.starts, is_wanted, MOST_ROWS)[-MOST_ROWS_OF_ALL:]
        if not len(rows):
            return
        places = take_places(self._states, self._owners, self._next, texts.slots[rows])
        self._next = (self._next + len(rows)) % len(self._owners)
        self._following[places] = texts.following[rows]
        if len(rows) < len(features):
            features = features[to_device(rows, features.device)]
        self._features.index_copy_(0, to_device(places, features.device), features)

    def to_read(
        self, step: StepInput, texts: TextRows, places: Int32, block_size: int, max_tokens: int
    ) -> TextsToRead:
        """What is read of requests int32 [n], and known of the last `max_tokens` tokens of each.

        What waits before a row that was read is not read any more: that row has not seen it.
        """
        return TextsToRead(
            *lay_out_texts(
                self._states, self._following, step.block_tables, step.context_lens, places,
                texts.starts, texts.slots, texts.positions, texts.following,
                block_size, max_tokens, MOST_ROWS,
            )
        )  # fmt: skip

    def features_of(self, sources: Int32, features: Tensor) -> Tensor:
        """[len(sources), width]: those of `TextsToRead`; `features` are those that come now."""
        is_new = sources < 0
        if is_new.all():
            if len(sources) == len(features):
                return features
            return features[to_device(-1 - sources, features.device)]
        waiting = self._features[to_device(sources[~is_new], features.device)]
        order = np.where(is_new, len(waiting) - 1 - sources, (~is_new).cumsum() - 1)
        return torch.cat([waiting, features])[to_device(order, features.device)]

    def load_loops(self) -> None:
        """Compile the loops, or load them, so that no step waits for it; while nothing is known."""
        one, two = np.zeros(1, dtype=np.int32), np.array([0, 1], dtype=np.int32)
        self.add(
            TextRows(one, one, one, two, ()),
            self._features[:1].clone(),
            np.zeros(1, dtype=np.bool_),
        )
        self.move(np.zeros((1, 2), dtype=np.int32))
        rest = one, two, one, one, one, 1, 1, 1
        lay_out_texts(self._states, self._following, one[None], one, *rest)
        self.clear()
