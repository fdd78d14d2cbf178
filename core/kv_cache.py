"""The KV blocks of a replica: which are free, who holds the others, and what their tokens are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .errors import CapacityError


class BlockPool:
    """Hands out blocks of KV slots; all stages share one numbering.

    A full block whose KV is final may be registered under a key (`core/request/request.py`);
    requests with the same prefix then share it. A registered block without an owner counts as
    free, but keeps its KV until it is needed: the one that was let go first is taken first.
    """

    __slots__ = ("_by_key", "_free", "_holders", "_idle", "_keys", "block_size", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._holders: dict[int, int] = {}
        self._keys: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.resize(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Have this many blocks. Only while none is held or registered."""
        assert not self._holders
        assert not self._idle
        self.num_blocks = num_blocks
        # Popped from the end: low ids first, and blocks freed last are used first.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self._free) + len(self._idle)

    @property
    def usage(self) -> float:
        """Share of the blocks that is held, 0 to 1."""
        return len(self._holders) / self.num_blocks

    def blocks_for(self, num_slots: int) -> int:
        """Blocks that hold `num_slots` slots."""
        return -(-num_slots // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Raises `CapacityError` and takes none if fewer are free."""
        if count > self.num_free:
            raise CapacityError(f"{count} KV blocks wanted, {self.num_free} free")
        return [self._take() for _ in range(count)]

    def num_shared(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """How many of these blocks, from the first on, are registered; how many of them idle."""
        shared = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            shared.append(block)
        return len(shared), sum(block in self._idle for block in shared)

    def share(self, keys: Sequence[bytes]) -> list[int]:
        """Hold the registered blocks of all these keys, too."""
        blocks = [self._by_key[key] for key in keys]
        for block in blocks:
            self._idle.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1
        return blocks

    def register(self, block: int, key: bytes) -> None:
        """Let others share a block from now on; it must be full, final and held.

        Where another block has the key already, that one goes on being shared.
        """
        assert block in self._holders, f"block {block} is not held"
        if block not in self._keys and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def unregister(self, keys: Sequence[bytes]) -> None:
        """Stop sharing the blocks of these keys with new requests, where there are any."""
        for key in keys:
            block = self._by_key.pop(key, None)
            if block is not None:
                del self._keys[block]
                if block in self._idle:
                    del self._idle[block]
                    self._free.append(block)

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back, in the order of their positions; each must be held."""
        # The last first, so that of one prefix the end is evicted before the beginning.
        for block in reversed(blocks):
            assert block in self._holders, f"block {block} is not held"
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                if block in self._keys:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def forget_keys(self) -> None:
        """Share no block any more: the KV is lost. Nobody may hold any."""
        assert not self._holders
        self._free.extend(self._idle)
        self._idle.clear()
        self._keys.clear()
        self._by_key.clear()

    def check(self) -> None:
        """Assert that every block is free, idle or held, once, and that keys are one to one."""
        free, idle, held = set(self._free), set(self._idle), set(self._holders)
        assert len(free) == len(self._free)
        assert free.isdisjoint(idle)
        assert held.isdisjoint(free | idle)
        assert len(held) + len(free) + len(idle) == self.num_blocks
        assert all(count > 0 for count in self._holders.values())
        assert idle <= set(self._keys) <= held | idle
        assert {key: block for block, key in self._keys.items()} == self._by_key

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._by_key[self._keys.pop(block)]
        self._holders[block] = 1
        return block
