"""KV blocks: those of a replica (`BlockPool`), those of one request (`RequestKv`), and the keys by
which requests with the same prefix find each other's (`PrefixKeys`)."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .arrays import Int32
from .errors import CapacityError

KEY_BYTES = 16
FIRST_TABLE_LEN = 16
NO_MOVES = np.empty((0, 2), dtype=np.int32)


@dataclass(slots=True, eq=False)
class RequestKv:
    """The KV cache of one request; `RequestState` and the scheduler change it.

    blocks         in position order; scratch slots of tree nodes follow the committed tokens; none
                   while the request waits
    key            names the request in steps (`StepInput.request_keys`) for as long as it holds KV
    state_slot     of its states in layers that keep one; -1: it has none
    snapshot       slot of states that it goes on from, until its first step is built; -1: of none
    cuts           where its prompt's chunks end, for snapshots of the states behind them
    prefix_keys    of its full blocks; None: it shares none
    prefill_len    positions to be cached in chunks: the prompt, or all committed tokens but the
                   last after a preemption
    num_scheduled  of these, how many were cached already or submitted; some may be in flight
    num_shared     of its blocks, how many others may share
    moves          int32 [m, 2]  copies of the last commits (from slot, to slot), which the
                   request's next step makes
    """

    blocks: list[int] = field(default_factory=list)
    key: int = 0
    state_slot: int = -1
    snapshot: int = -1
    cuts: tuple[int, ...] = ()
    prefix_keys: PrefixKeys | None = None
    prefill_len: int = 0
    num_scheduled: int = 0
    num_shared: int = 0
    moves: Int32 = field(default_factory=lambda: NO_MOVES)
    # The blocks' ids as an array with room behind them, and how many of the first are in it.
    _table: Int32 = field(default_factory=lambda: np.empty(FIRST_TABLE_LEN, dtype=np.int32))
    _num_tabled: int = 0

    @property
    def num_prefill_left(self) -> int:
        """Tokens that are to be cached in chunks and that no step has taken yet."""
        return self.prefill_len - self.num_scheduled

    def begin(self, key: int, blocks: list[int], num_cached: int, prefill_len: int) -> None:
        """Take KV blocks, the first of which hold `num_cached` tokens already."""
        self.key, self.blocks = key, blocks
        self._num_tabled = 0
        self.prefill_len, self.num_scheduled = prefill_len, num_cached

    def take_blocks(self, blocks: Sequence[int]) -> None:
        """Take further blocks."""
        self.blocks += blocks

    def drop_blocks(self, count: int) -> list[int]:
        """Give up the last blocks; returns them."""
        dropped = self.blocks[-count:]
        del self.blocks[-count:]
        self._num_tabled = min(self._num_tabled, len(self.blocks))
        return dropped

    def block_table(self) -> Int32:
        """The ids of the blocks, int32 [blocks]; valid until they change."""
        first, count = self._num_tabled, len(self.blocks)
        if first < count:
            if count > len(self._table):
                self._table = np.resize(self._table, 2 * count)
            self._table[first:count] = self.blocks[first:]
            self._num_tabled = count
        return self._table[:count]

    def release(self) -> list[int]:
        """Give up all of it; returns the blocks."""
        blocks, self.blocks = self.blocks, []
        self.moves, self.cuts = NO_MOVES, ()
        self.state_slot = self.snapshot = -1
        self._num_tabled = 0
        self.num_scheduled = self.prefill_len = self.num_shared = 0
        return blocks


class PrefixKeys:
    """The keys of one request's full blocks: a hash chain over its committed tokens.

    A block's key covers its own tokens and all before them, for their KV depends on both, and the
    salt: requests of different salts never share a block, and cannot find out by timing what
    another has sent.
    """

    __slots__ = ("_block_size", "_first", "_keys", "_last")

    def __init__(self, salt: str, block_size: int) -> None:
        self._block_size = block_size
        self._first = self._last = hashlib.blake2b(salt.encode(), digest_size=KEY_BYTES).digest()
        self._keys: list[bytes] = []

    def cut(self, num_tokens: int) -> None:
        """Forget what followed the first tokens, behind which the text reads otherwise now."""
        del self._keys[num_tokens // self._block_size :]
        self._last = self._keys[-1] if self._keys else self._first

    def upto(self, token_ids: Sequence[int] | Int32, num_tokens: int) -> list[bytes]:
        """Keys of the full blocks among the first `num_tokens`; earlier tokens never change."""
        return self.after(0, token_ids, num_tokens)

    def after(
        self, num_blocks: int, token_ids: Sequence[int] | Int32, num_tokens: int
    ) -> list[bytes]:
        """The same without those of the first `num_blocks`."""
        size, count = self._block_size, num_tokens // self._block_size
        known = len(self._keys)
        if known < count:
            # At once: a prompt may have thousands of blocks.
            data = _bytes_of(token_ids[known * size : count * size])
            for start in range(0, len(data), 4 * size):
                block = data[start : start + 4 * size]
                self._last = hashlib.blake2b(self._last + block, digest_size=KEY_BYTES).digest()
                self._keys.append(self._last)
        return self._keys[num_blocks:count]


def _bytes_of(token_ids: Sequence[int] | Int32) -> bytes:
    """The tokens as numbers of 32 bits, in this machine's order: keys never leave it."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.astype(np.int32, copy=False).tobytes()
    # A third of the time that numpy takes for a list.
    return array("i", token_ids).tobytes()


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
