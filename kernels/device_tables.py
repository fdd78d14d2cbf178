"""Tables on a device: buffers that the host refills without waiting, and a cache by size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from ..core.arrays import Int32

# In numbers of four bytes. Triton recompiles a kernel for addresses that are not multiples of 16
# bytes.
ALIGNMENT = 4


class StagedBuffer:
    """int32 [size] on a device, with two alternating pinned buffers on the host.

    The host writes one of them while the device may still be copying the other.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self._pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=is_gpu) for _ in range(2)]
        self._hosts: list[Int32] = [pinned.numpy() for pinned in self._pinned]
        self._copied = [torch.cuda.Event() for _ in self._pinned] if is_gpu else []
        self._turn = 0

    @staticmethod
    def sections(sizes: Mapping[str, int]) -> dict[str, slice]:
        """Slices for arrays of these sizes, one after the other, each at an aligned address."""
        starts = np.cumsum([0, *(aligned(size) for size in sizes.values())]).tolist()
        return {
            name: slice(start, start + size)
            for (name, size), start in zip(sizes.items(), starts, strict=False)
        }

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.device.nbytes

    def next(self) -> Int32:
        """The host buffer to write next, int32 [size]; it still has the content of the send before
        last.

        Waits until that copy to the device has ended.
        """
        self._turn = 1 - self._turn
        if self._copied:
            self._copied[self._turn].synchronize()
        return self._hosts[self._turn]

    def send(self, used: int) -> None:
        """Start to copy the first `used` numbers; work launched from now on sees them."""
        self.device[:used].copy_(self._pinned[self._turn][:used], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()


def aligned(size: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


# Most bytes of the tables of one kind: attention layouts, logit edits, sampling parameters,
# rows of layers that keep states. A stage's memory profile reserves this much for each kind.
MOST_TABLE_BYTES = 64 * 2**20
NUM_KINDS = 4


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
