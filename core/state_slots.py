"""Slots of states, in models whose layers keep a state of each text.

Each running request has one. The others hold snapshots: states behind the beginning of a text, for
requests that begin alike. A request can go on from a beginning where its KV blocks are shared and
there is a snapshot of the state behind them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

NO_SLOT = -1


class Snapshot(NamedTuple):
    """A slot, and whether the step that fills it has finished."""

    slot: int
    is_there: bool


class StateSlots:
    """Hands out slots; all stages share one numbering.

    Snapshots go by the key of the last block before them (`PrefixKeys`). The one that was used
    least recently makes room.
    """

    __slots__ = ("_free", "_free_snapshots", "_pins", "_snapshots", "_total")

    def __init__(self, num_requests: int, num_snapshots: int) -> None:
        """No slots at all for models without states."""
        self._free = [*range(num_requests)]
        self._total = num_requests, num_snapshots
        self._pins = Counter[int]()
        self.forget_snapshots()

    def take(self) -> int:
        """A slot for a request that starts; `NO_SLOT` where models keep no states."""
        return self._free.pop() if self._total[0] else NO_SLOT

    def give_back(self, slot: int) -> None:
        """The request has ended, or waits. Safe while its steps are in flight: those of the next
        owner run behind them."""
        if slot != NO_SLOT:
            self._free.append(slot)

    @property
    def keeps_states(self) -> bool:
        """Whether there are any."""
        return bool(self._total[0])

    def longest(self, keys: Sequence[bytes]) -> int:
        """How many of the blocks of these keys, from the first on, end before a snapshot."""
        for count in range(len(keys), 0, -1):
            snapshot = self._snapshots.get(keys[count - 1])
            if snapshot is not None and snapshot.is_there:
                return count
        return 0

    def pin(self, key: bytes) -> int:
        """The slot of a snapshot, which stays there until `unpin`."""
        slot = self._snapshots[key].slot
        self._snapshots.move_to_end(key)
        self._pins[slot] += 1
        return slot

    def unpin(self, slot: int) -> None:
        """The step that reads the snapshot comes next; or none does."""
        self._pins[slot] -= 1

    def reserve(self, key: bytes) -> int:
        """A slot for the snapshot of a step; `NO_SLOT` where there is one, or no room."""
        if key in self._snapshots:
            return NO_SLOT
        if not self._free_snapshots:
            unused = (own for own, one in self._snapshots.items() if not self._pins[one.slot])
            oldest = next(unused, None)
            if oldest is None:
                return NO_SLOT
            self._free_snapshots.append(self._snapshots.pop(oldest).slot)
        slot = self._free_snapshots.pop()
        self._snapshots[key] = Snapshot(slot, is_there=False)
        return slot

    def note_filled(self, key: bytes, slot: int) -> None:
        """The step of a snapshot has finished. Without this nobody goes on from it."""
        if self._snapshots.get(key) == (slot, False):
            self._snapshots[key] = Snapshot(slot, is_there=True)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Nobody goes on from the snapshots of these keys any more."""
        for key in keys:
            if key in self._snapshots:
                # In its place, until it makes room: a request may be about to read it.
                self._snapshots[key] = self._snapshots[key]._replace(is_there=False)

    def forget_snapshots(self) -> None:
        """All states are lost."""
        num_requests, num_snapshots = self._total
        self._snapshots = OrderedDict[bytes, Snapshot]()
        self._free_snapshots = [*range(num_requests, num_requests + num_snapshots)]
