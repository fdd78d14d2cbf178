"""Memory in large pages, for weights and for keys and values, which every step reads.

In pages of 4 KiB a processor has to translate an address for every 4,096 bytes, and reads ahead
only to their end.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from threading import Lock

import torch
from torch import Tensor

LARGE_PAGE = 2**21
# Asked of the system at once for small tensors; what they do not fill takes no memory.
BLOCK = 2**26
CACHE_LINE = 64


class LargePages:
    """Copies tensors one behind the other into large pages.

    Memory is freed with the last tensor of its block.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """The same on a CPU, contiguous; in small pages where the system has no others."""
        size = tensor.nbytes
        if size == 0:
            return tensor
        copied = self._room(size).view(tensor.dtype).view(tensor.shape)
        copied.copy_(tensor)
        return copied

    def _room(self, size: int) -> Tensor:
        if size >= BLOCK:
            return _block(size)
        with self._lock:
            if self._used + size > len(self._block):
                self._block, self._used = _block(BLOCK), 0
            first = self._used
            self._used += -(-size // CACHE_LINE) * CACHE_LINE
            return self._block[first : first + size]


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `torch.zeros` on a CPU, with parts [0], [1], ... that need not lie one behind the other.

    The system zeroes a page when it is first written to, which takes milliseconds. A step writes to
    the same places of all parts, so large parts begin at different places of a page: else it would
    wait for a page of each.
    """
    count, *part = shape
    size = prod(part) * dtype.itemsize
    if not count or size < LARGE_PAGE:
        return _block(count * size).view(dtype).view(*shape)
    shift = LARGE_PAGE // count // CACHE_LINE * CACHE_LINE
    apart = size + (shift - size) % LARGE_PAGE
    parts = _block(count * apart).view(count, apart)[:, :size]
    return parts.view(dtype).view(*shape)


def _block(size: int) -> Tensor:
    """uint8 [size], zeros."""
    memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Where the system has no large pages, the advice is refused.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    first = -block.data_ptr() % LARGE_PAGE
    return block[first : first + size]
