"""An LRU cache of device tables by size, within a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

# Most bytes of the tables of one kind: attention layouts, logit edits, sampling parameters. A
# stage's memory profile reserves this much for each kind.
MOST_TABLE_BYTES = 64 * 2**20
NUM_KINDS = 3


class Table(Protocol):
    """Data on a device that can be rebuilt."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes there."""
        ...


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Table)


class RecentTables(Generic[K, V]):
    """Tables by their size. The least recently used ones are dropped beyond the limit of bytes, but
    never the last used one, however large.
    """

    def __init__(self, most_bytes: int = MOST_TABLE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._tables: OrderedDict[K, V] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Bytes of all cached tables."""
        return self._num_bytes

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The table of this size, made if it is not cached."""
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = make()
            self._num_bytes += table.num_bytes
        self._tables.move_to_end(key)
        while self._num_bytes > self._most_bytes and len(self._tables) > 1:
            _, oldest = self._tables.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
        return table
