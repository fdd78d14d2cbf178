"""Device tables of the sizes that were used last, within a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

# Of the tables of one kind: layouts of attention, logit edits, parameters of sampling. A stage's
# memory is sized with so much for each.
MOST_TABLE_BYTES = 64 * 2**20
NUM_KINDS = 3


class Table(Protocol):
    """What lies on a device and may be made anew."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes there."""
        ...


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Table)


class RecentTables(Generic[K, V]):
    """Tables by their size. Those that were asked for longest ago go when there are too many bytes;
    never the one that was asked for last, however large.
    """

    def __init__(self, most_bytes: int = MOST_TABLE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._tables: OrderedDict[K, V] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Bytes of all that are kept."""
        return self._num_bytes

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The table of this size, made if it is not there."""
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = make()
            self._num_bytes += table.num_bytes
        self._tables.move_to_end(key)
        while self._num_bytes > self._most_bytes and len(self._tables) > 1:
            _, oldest = self._tables.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
        return table
