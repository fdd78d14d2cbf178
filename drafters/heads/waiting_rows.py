"""What a head of the last stage knows of the token in each KV slot.

It has read it, its features wait to be read, or nothing is known. All is kept by slot, in arrays
that are made once: so nothing is left of a request that has ended but what the slots of a shared
prefix hold, and a step costs one indexed copy, however many requests it has.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Bool, Int32
from ...core.steps import StepInput
from ...models.device import to_device
from ...models.stage.stage_heads import TextRows
from .slot_loops import (
    READ,
    UNKNOWN,
    lay_out_texts,
    move_states,
    newest_rows,
    set_states,
    take_places,
)

# Rows that are read late for a request, and that wait for all of them together. Older ones are let
# go: the head then drafts from what it knows.
MOST_ROWS, MOST_ROWS_OF_ALL = 256, 4096


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
