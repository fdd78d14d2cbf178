"""The sampling parameters of rows, as device tensors that are refilled in place."""

from __future__ import annotations

from copy import copy
from math import inf

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Float32
from ...core.sampling import stream_keys
from ...core.steps import SamplingRows
from ..device_tables import StagedBuffer, aligned


class SamplingTables:
    """Parameters of up to `num_rows` rows; valid until the next `refill`. One copy to the device.

    keys         int64 [rows]    `core.sampling.stream_keys` of seeds and positions
    temperatures float32 [rows]  0 is greedy
    top_p        float32 [rows]  1 is off
    floors       float32 [rows]  the least value that min_p keeps; -inf is off
    top_k        int32 [rows]    0 is off

    samples      whether any row has a temperature
    filters      whether top_k or top_p cuts any row
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.capacity, self.vocab_size = num_rows, vocab_size
        self.num_rows = num_rows
        self.samples = self.filters = False
        # The keys, and four numbers of half their width.
        self._width = aligned(num_rows)
        self._buffer = StagedBuffer(6 * self._width, device)
        keys = self._buffer.device[: 2 * self._width].view(torch.int64)
        floats = self._buffer.device[2 * self._width :].view(torch.float32).view(4, -1)
        self.keys = keys[:num_rows]
        self.temperatures, self.top_p, self.floors, top_k = (part[:num_rows] for part in floats)
        self.top_k = top_k.view(torch.int32)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self._buffer.num_bytes

    def part(self, first: int, count: int) -> SamplingTables:
        """`count` rows from `first` on, a multiple of `ALIGNMENT`. A `refill` of the whole fills
        them; whether they sample and are filtered stays as it is now.
        """
        part = copy(self)
        part.num_rows = part.capacity = count
        for name in ("keys", "temperatures", "top_p", "floors", "top_k"):
            setattr(part, name, getattr(self, name)[first : first + count])
        return part

    def refill(self, sampling: SamplingRows) -> None:
        """Fill the tables with these rows, which must fit; none may have a typical_p below 1."""
        self.num_rows = count = len(sampling.temperature)
        assert count <= self.capacity
        assert (sampling.typical_p == 1).all()
        host = self._buffer.next()
        keys = host[: 2 * self._width].view(np.int64)
        floats = host[2 * self._width :].view(np.float32).reshape(4, -1)
        top_k = np.where(sampling.top_k < self.vocab_size, sampling.top_k, 0)
        keys[:count] = stream_keys(sampling.seed, sampling.position).view(np.int64)
        floats[0] = 0
        columns = (sampling.temperature, sampling.top_p, least_kept(sampling.min_p))
        for index, values in enumerate(columns):
            floats[index, :count] = values
        floats[3].view(np.int32)[:count] = top_k
        has_noise = sampling.temperature > 0
        self.samples = bool(has_noise.any())
        self.filters = bool((has_noise & ((top_k > 0) | (sampling.top_p < 1))).any())
        self._buffer.send(6 * self._width)


def least_kept(min_p: Float32) -> Float32:
    """The least float32 that is not below log(min_p) in float64; -inf for 0."""
    with np.errstate(divide="ignore"):
        exact = np.log(min_p.astype(np.float64))
    rounded = exact.astype(np.float32)
    return np.where(rounded < exact, np.nextafter(rounded, np.float32(inf)), rounded)


class SamplingScratch:
    """Intermediate results of the kernels, for tables of the same capacity and vocabulary.

    bests, winners        float32 [rows, chunks]  scores of parts of the vocabulary
    best_ids, winner_ids  int32 [rows, chunks]
    histogram     int32 [rows, bins]; sums int64 [rows, 2]
    doubt         int32 [rows, 4]  what `filter_kernels.bins_in_doubt` gives
    candidates    int64 [rows, room]; num_gathered int32 [rows], how many of them are in use
    thresholds    int64 [rows]
    """

    def __init__(
        self, num_rows: int, vocab_size: int, device: torch.device, *,
        chunk_len: int = 4096, bins: int = 512, room: int = 4096,
    ) -> None:  # fmt: skip
        self.chunk_len, self.room = chunk_len, room
        self.num_chunks = -(-vocab_size // chunk_len)

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(num_rows, *shape, dtype=dtype, device=device)

        self.bests = empty(self.num_chunks, dtype=torch.float32)
        self.winners = torch.empty_like(self.bests)
        self.best_ids = empty(self.num_chunks, dtype=torch.int32)
        self.winner_ids = torch.empty_like(self.best_ids)
        self.histogram = empty(bins, dtype=torch.int32)
        self.sums = empty(2, dtype=torch.int64)
        self.doubt = empty(4, dtype=torch.int32)
        self.num_gathered = empty(dtype=torch.int32)
        self.candidates = empty(room, dtype=torch.int64)
        self.thresholds = empty(dtype=torch.int64)
