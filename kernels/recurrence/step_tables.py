"""Where a step's rows go on from in layers that keep states, as device tensors.

They are refilled in place, so that a CUDA graph captured with them serves every step that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Bool, Int32, Int64
from ..device_tables import StagedBuffer

# Rows that are solved at once.
BLOCK = 16
# Columns of `StepTables.requests`.
REQUEST_FIELDS = 8


class RequestRows(NamedTuple):
    """One request's part of a step.

    slot       of its state
    committed  int64 [n]  kept rows that its text has passed, which its state takes in first
    columns    int64 [m]  kept rows that its rows see, those of earlier steps first
    sees       bool [m, m]  which of them each sees; None: a chunk of a prompt, each of whose rows
               sees those before it, and which its state takes in, too
    rows       its rows in the step, the last columns
    begins     whether its text does: its state is zeros, whatever the slot holds
    """

    slot: int
    committed: Int64
    columns: Int64
    sees: Bool | None
    rows: slice
    begins: bool = False

    @property
    def num_blocks(self) -> int:
        """Of its columns."""
        return -(-len(self.columns) // BLOCK)


@dataclass(frozen=True, slots=True)
class TablesCapacity:
    """The largest step that tables hold.

    num_columns  kept rows that texts have passed or rows see
    num_bits     entries of `StepTables.sees`
    num_pairs    of each list of moves
    """

    num_rows: int
    num_requests: int
    num_columns: int
    num_bits: int
    num_pairs: int

    @classmethod
    def exact(
        cls, num_rows: int, requests: Sequence[RequestRows], num_pairs: int
    ) -> TablesCapacity:
        """The least that holds a step."""
        return cls(
            num_rows,
            len(requests),
            sum(len(one.committed) + len(one.columns) for one in requests),
            sum(len(one.columns) * one.num_blocks for one in requests if one.sees is not None),
            num_pairs,
        )

    def rounded(self) -> TablesCapacity:
        """Each side up to a power of two, so that few serve all."""
        return TablesCapacity(*(1 << max(side - 1, 0).bit_length() for side in astuple(self)))

    def holds(self, other: TablesCapacity) -> bool:
        """Whether a step of capacity `other` fits."""
        return all(own >= its for own, its in zip(astuple(self), astuple(other), strict=True))


class StepTables:
    """The tables of one step after another; valid until the next `refill`. Empty at first.

    requests  int32 [requests, REQUEST_FIELDS]  slot; where its kept rows begin in `columns`; how
              many its text has passed, how many are known, how many are its own; its first row of
              the step; where its bits begin in `sees`, -1 for a chunk; whether its text begins.
              Requests of padding have no rows
    columns   int32 [columns]  kept rows: those that the text has passed, then those that rows see
    sees      int32 [bits]  for each column of a tree, 16 bits a block of columns
    places    int32 [rows]  where each row is kept
    taps      int32 [rows, width]  inputs of the convolution that each reads, its own last
    moves_before, moves_after  int32 [2, pairs]  of inputs: to, and from

    described  the requests, as they were given

    Padding is kept in row 0, which is no row's, and moves copy the inputs of place 0, which are
    zeros, onto themselves.
    """

    def __init__(self, capacity: TablesCapacity, width: int, device: torch.device) -> None:
        self.capacity = capacity
        self.described: Sequence[RequestRows] = ()
        sizes = {
            "requests": capacity.num_requests * REQUEST_FIELDS,
            "columns": capacity.num_columns,
            "places": capacity.num_rows,
            "taps": capacity.num_rows * width,
            "moves_before": 2 * capacity.num_pairs,
            "moves_after": 2 * capacity.num_pairs,
            "sees": capacity.num_bits,
        }
        self._sections = StagedBuffer.sections(sizes)
        self._buffer = StagedBuffer(max(one.stop for one in self._sections.values()), device)
        self._host = self._buffer.next()
        self.requests = self._view("requests").view(-1, REQUEST_FIELDS)
        self.columns, self.sees = self._view("columns"), self._view("sees")
        self.places, self.taps = self._view("places"), self._view("taps").view(-1, width)
        self.moves_before = self._view("moves_before").view(2, capacity.num_pairs)
        self.moves_after = self._view("moves_after").view(2, capacity.num_pairs)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self._buffer.num_bytes

    @property
    def num_requests(self) -> int:
        """Of a launch."""
        return self.capacity.num_requests

    def refill(
        self, requests: Sequence[RequestRows], places: Int64, taps: Int64, spare_taps: Int64,
        moves: Sequence[tuple[Int64, Int64]],
    ) -> None:  # fmt: skip
        """Describe a step, which must fit.

        places, taps  int64 [rows] and [rows, width]
        spare_taps    int64 [width]  of rows of padding
        moves         before the rows and behind them: to and from, int64 [n] each
        """
        self.described = requests
        self._host = self._buffer.next()
        table, columns, bits = [], [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int32)]
        num_columns = num_bits = 0
        for one in requests:
            num_rows = one.rows.stop - one.rows.start
            known = len(one.columns) - num_rows
            first_bits = -1 if one.sees is None else num_bits
            table.append(
                [one.slot, num_columns, len(one.committed), known, num_rows, one.rows.start,
                 first_bits, one.begins]
            )  # fmt: skip
            columns += [one.committed, one.columns]
            num_columns += len(one.committed) + len(one.columns)
            if one.sees is not None:
                bits.append(_packed(one.sees))
                num_bits += bits[-1].size
        self._put("requests", np.array(table), 0)
        self._put("columns", np.concatenate(columns))
        self._put("places", places, 0)
        self._put("taps", taps, spare_taps)
        for name, (to, source) in zip(("moves_before", "moves_after"), moves, strict=True):
            pairs = self._host[self._sections[name]].reshape(2, self.capacity.num_pairs)
            pairs[:, len(to) :] = 0
            pairs[0, : len(to)], pairs[1, : len(to)] = to, source
        self._put("sees", np.concatenate(bits))
        self._buffer.send(self._sections["sees"].start + num_bits)

    def _put(self, name: str, values: Int32 | Int64, rest: Int64 | int | None = None) -> None:
        section = self._host[self._sections[name]]
        section[: values.size] = values.ravel()
        if rest is not None:
            free = section[values.size :]
            free[:] = rest if isinstance(rest, int) else np.resize(rest, len(free))

    def _view(self, name: str) -> Tensor:
        return self._buffer.device[self._sections[name]]


def _packed(sees: Bool) -> Int32:
    """int32 [m * blocks] of bool [m, m]."""
    count = len(sees)
    padded = np.pad(sees, ((0, 0), (0, -count % BLOCK)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint16).astype(np.int32).ravel()
