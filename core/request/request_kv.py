"""The KV cache of one request: its blocks, what of its text they hold, and the names under which
other requests find them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..arrays import Int32

KEY_BYTES = 16
FIRST_TABLE_LEN = 16
NO_MOVES = np.empty((0, 2), dtype=np.int32)


@dataclass(slots=True, eq=False)
class RequestKv:
    """The KV cache of one request; `RequestState` and the scheduler change it.

    blocks         in position order; scratch slots of tree nodes follow the committed tokens; none
                   while the request waits
    key            names the request in steps (`StepInput.request_keys`) for as long as it holds KV
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
        self.moves = NO_MOVES
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
