"""The KV blocks of a model drafter's requests: texts that begin alike share those of what is equal.

As the target shares its own (`core/scheduler.py`): full blocks, found by a hash of all
tokens up to their end, among requests of one namespace and cache salt only.
"""

from __future__ import annotations

import logging

from ...core.errors import CapacityError
from ...core.interfaces import PrefixCounts
from ...core.kv_cache import BlockPool
from .cached_text import CachedText

logger = logging.getLogger(__name__)


class PrefixCache:
    """Gives blocks to texts, and keeps unused ones until their room is needed.

    is_shared  whether texts share any
    """

    def __init__(self, num_blocks: int, block_size: int, *, is_shared: bool) -> None:
        self._pool = BlockPool(num_blocks, block_size)
        self._is_shared = is_shared
        self.counts = PrefixCounts()
        self._told_full = False

    @property
    def num_free(self) -> int:
        """Blocks that no text holds."""
        return self._pool.num_free

    def reserve(self, text: CachedText, num_fed: int) -> None:
        """Blocks for the text, and for so many drafted tokens that are fed.

        A text that had none begins with those of the longest prefix that is cached. Raises
        `CapacityError` where there is no room; the text has no block then, so that not all texts
        wait for one another.
        """
        is_new = not text.blocks
        if is_new and self._is_shared:
            self._share(text)
        needed = self._pool.blocks_for(len(text.tokens) + num_fed)
        try:
            text.blocks.extend(self._pool.allocate(max(0, needed - len(text.blocks))))
        except CapacityError:
            self.release(text)
            raise
        if is_new and self._is_shared:
            queries, hits = self.counts
            self.counts = PrefixCounts(queries + len(text.tokens), hits + text.cached_len)

    def has_reserved(self, text: CachedText, num_fed: int, drafter: str) -> bool:
        """Whether `reserve` found room; the first time that it did not is logged."""
        try:
            self.reserve(text, num_fed)
        except CapacityError:
            if not self._told_full:
                self._told_full = True
                logger.warning(
                    "drafter KV cache is full, some requests get no drafts "
                    "drafter=%s num_blocks=%d",
                    drafter,
                    self._pool.num_blocks,
                )
            return False
        return True

    def register(self, text: CachedText) -> None:
        """Let others share what is cached of the text from now on.

        Its last token is fed again if need be, so the block that ends with it is not final yet.
        """
        if not (self._is_shared and text.blocks):
            return
        num_final = min(text.cached_len, len(text.tokens) - 1)
        for key in text.keys.after(text.num_final_blocks, text.tokens, num_final):
            self._pool.register(text.blocks[text.num_final_blocks], key)
            text.num_final_blocks += 1

    def drop_rewritten(self, text: CachedText) -> None:
        """Give up blocks that others may share, where the text reads otherwise now.

        That happens to texts in a tokenizer of their own: what follows changes their last tokens.
        """
        num_kept = text.cached_len // self._pool.block_size
        if num_kept < text.num_final_blocks:
            self._pool.free(text.blocks[num_kept:])
            text.keep_blocks(num_kept, self._pool.block_size)

    def release(self, text: CachedText) -> None:
        """Give back all blocks of a text; those that other texts may share stay cached."""
        self._pool.free(text.blocks)
        text.keep_blocks(0, self._pool.block_size)

    def check(self) -> None:
        """Assert that every block is free, idle or held; see `BlockPool.check`."""
        self._pool.check()

    def _share(self, text: CachedText) -> None:
        # The last token is fed in any case: its row draws.
        keys = text.keys.upto(text.tokens, len(text.tokens) - 1)
        num_shared, _ = self._pool.num_shared(keys)
        text.take_prefix(self._pool.share(keys[:num_shared]), self._pool.block_size)
