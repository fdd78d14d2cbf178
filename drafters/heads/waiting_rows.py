"""Features that a head of the last stage has not read, since nobody wanted drafts."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Int32

# Rows that wait for a request, and for all of them together. Older ones are let go: the head then
# drafts from what it knows.
MOST_ROWS, MOST_ROWS_OF_ALL = 256, 4096


class Rows(NamedTuple):
    """Rows of one text.

    features   [n, width]  of the target
    following  int32 [n]   the tokens behind their own
    positions  int32 [n]   rising
    """

    features: Tensor
    following: Int32
    positions: Int32

    def before(self, position: int) -> Rows:
        """Those before a position."""
        count = int(np.searchsorted(self.positions, position))
        return Rows(self.features[:count], self.following[:count], self.positions[:count])


def joined(parts: list[Rows]) -> Rows:
    """One behind the other."""
    features, following, positions = zip(*parts, strict=True)
    return Rows(torch.cat(features), np.concatenate(following), np.concatenate(positions))


class WaitingRows:
    """The newest rows of each request that were not read, by its key. The request that was seen
    least of late loses its rows first, since nobody tells when one ends.
    """

    def __init__(self) -> None:
        self._by_request: OrderedDict[int, _Waiting] = OrderedDict()
        self._num_rows = 0

    def clear(self) -> None:
        """Let all go."""
        self._by_request.clear()
        self._num_rows = 0

    def add(self, key: int, rows: Rows) -> None:
        """Keep rows of a request, which stand behind those that wait, or in place of them where it
        was computed again."""
        waiting = self._pop(key)
        if waiting.parts and waiting.parts[-1].positions[-1] >= rows.positions[0]:
            waiting = _Waiting()
        # A copy: what comes is part of a whole step's. What is too old is let go part by part.
        features, following, positions = rows
        newest = Rows(features[-MOST_ROWS:].clone(), following[-MOST_ROWS:], positions[-MOST_ROWS:])
        waiting.parts.append(newest)
        waiting.num_rows += len(newest.positions)
        while waiting.num_rows > MOST_ROWS:
            waiting.num_rows -= len(waiting.parts.popleft().positions)
        self._by_request[key] = waiting
        self._num_rows += waiting.num_rows
        while self._num_rows > MOST_ROWS_OF_ALL:
            self._pop(next(iter(self._by_request)))

    def take(self, key: int, end: int) -> list[Rows]:
        """The rows of a request before a position, oldest first; none of it waits any more."""
        parts = self._pop(key).parts
        return [own for part in parts if len((own := part.before(end)).positions)]

    def _pop(self, key: int) -> _Waiting:
        waiting = self._by_request.pop(key, None) or _Waiting()
        self._num_rows -= waiting.num_rows
        return waiting


@dataclass(slots=True, eq=False)
class _Waiting:
    """Rows of one request, in the parts that they came in; `num_rows` of all."""

    parts: deque[Rows] = field(default_factory=deque)
    num_rows: int = 0
