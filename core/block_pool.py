"""The KV blocks of a replica: which are free, and who holds the others."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import CapacityError


class BlockPool:
    """Hands out blocks of KV slots; all stages share one numbering."""

    __slots__ = ("_free", "_held", "block_size", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Popped from the end: low ids first, and blocks freed last are used first.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that is held, 0 to 1."""
        return len(self._held) / self.num_blocks

    def blocks_for(self, num_slots: int) -> int:
        """Blocks that hold `num_slots` slots."""
        return -(-num_slots // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Raises `CapacityError` and takes none if fewer are free."""
        if count > len(self._free):
            raise CapacityError(f"{count} KV blocks wanted, {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        self._held.update(blocks)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back; each must be held."""
        for block in blocks:
            assert block in self._held, f"block {block} is not held"
            self._held.remove(block)
            self._free.append(block)

    def check(self) -> None:
        """Assert that every block is either free or held, once."""
        assert len(self._free) == len(set(self._free))
        assert self._held.isdisjoint(self._free)
        assert len(self._held) + len(self._free) == self.num_blocks
