"""The slots in which stages keep what does not change about a request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ....core.arrays import Int32

NUM_SLOTS = 512


class RequestSlots:
    """Gives each request a slot, and keeps it there for as long as others do not need the room.

    What a slot holds is never taken for granted, so a request that ended need not be reported: the
    slot that was used least recently goes to the next newcomer.
    """

    __slots__ = ("_most", "_slots")

    def __init__(self, most: int = NUM_SLOTS) -> None:
        """`most` slots, or as many as one step has requests."""
        self._most = most
        self._slots: OrderedDict[int, int] = OrderedDict()

    def place(self, keys: Sequence[int]) -> Int32:
        """The slot of each request of a step, int32 [requests]; no two share one.

        `keys` name requests from step to step; where two are equal, none of them counts.
        """
        if len(set(keys)) < len(keys):
            keys = range(-1, -1 - len(keys), -1)
        slots, known = self._slots, [key for key in keys if key in self._slots]
        for key in known:
            slots.move_to_end(key)
        self._most = max(self._most, len(keys))
        if len(known) < len(keys):
            for key in keys:
                if key not in slots:
                    free = len(slots) < self._most
                    slots[key] = len(slots) if free else slots.popitem(last=False)[1]
        return np.fromiter(map(slots.__getitem__, keys), dtype=np.int32, count=len(keys))
