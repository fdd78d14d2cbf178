"""Names the KV blocks of a text by everything that decides what they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

KEY_BYTES = 16


class PrefixKeys:
    """The keys of one request's full blocks: a hash chain over its committed tokens.

    A block's key covers its own tokens and all before them, for their KV depends on both, and the
    salt: requests of different salts never share a block, and cannot find out by timing what
    another has sent.
    """

    __slots__ = ("_block_size", "_keys", "_last")

    def __init__(self, salt: str, block_size: int) -> None:
        self._block_size = block_size
        self._last = hashlib.blake2b(salt.encode(), digest_size=KEY_BYTES).digest()
        self._keys: list[bytes] = []

    def upto(self, token_ids: Sequence[int], num_tokens: int) -> list[bytes]:
        """Keys of the full blocks among the first `num_tokens`; earlier tokens never change."""
        count = num_tokens // self._block_size
        while len(self._keys) < count:
            start = len(self._keys) * self._block_size
            tokens = np.array(token_ids[start : start + self._block_size], dtype="<i4")
            self._last = hashlib.blake2b(
                self._last + tokens.tobytes(), digest_size=KEY_BYTES
            ).digest()
            self._keys.append(self._last)
        return self._keys[:count]
