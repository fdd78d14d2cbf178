"""A request's text, the part of it that a drafter's KV cache holds, and the blocks of that cache.

Requests whose texts begin alike share blocks as the target's do (`core/scheduler.py`):
full blocks, found by a hash of all tokens up to their end, in one namespace and cache salt only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.arrays import Int32
from ...core.errors import CapacityError
from ...core.interfaces import PrefixCounts
from ...core.kv_cache import BlockPool, PrefixKeys
from ...core.proposals import DraftRequest
from ..coupled_rank import CoupledChoice
from .chain_job import ChainJob
from .stopping_rules import ChainLength, num_equal
from .text_distribution import TextDistribution
from .vocabulary.strategy import DraftText, DraftVocabulary, SameText

# A Python number and a place in a list.
TOKEN_BYTES = 36
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextEnd:
    """What a draft goes on from: a text, and what is assumed to follow it.

    text           both in the drafter's own tokens
    num_kept       its first tokens, which are those of the committed text that stay as they are
    next_position  of the first drafted token as its noise counts
    choice         how the target chooses the token behind
    distribution   how the drafter does; the draft's own
    """

    text: DraftText
    num_kept: int
    next_position: int
    choice: CoupledChoice
    distribution: TextDistribution

    @property
    def added(self) -> list[int]:
        """The tokens behind those that stay."""
        return self.text.tokens[self.num_kept :]


class CachedText:
    """The committed text of a request, and how much of it the KV cache holds.

    blocks        KV blocks, in order of positions
    keys          names of its full blocks, of the drafter's own tokens
    num_final_blocks  of the first blocks, how many others may share: their KV is not written again
    committed_len committed target ids
    cached_len    positions 0 to cached_len - 1 of the cache are those of `tokens`, the text in the
                  drafter's own tokens
    distribution  how the token after the text is chosen
    seed          of the request's noise
    length        decides how long the chains after the text become
    proposed      tokens and parents of the last proposal, until it was decided about
    took_one_step whether a single verification may have brought the tokens committed last
    is_draftable  false once the text holds an id that the model cannot read, where it has nothing
                  to feed, and where the model has no token that may be chosen
    """

    __slots__ = (
        "_drawn",
        "_is_known",
        "_vocabulary",
        "blocks",
        "cached_len",
        "committed_len",
        "distribution",
        "keys",
        "length",
        "num_final_blocks",
        "proposed",
        "seed",
        "text",
        "took_one_step",
    )

    def __init__(
        self,
        request: DraftRequest,
        vocabulary: DraftVocabulary,
        length: ChainLength,
        block_size: int,
    ) -> None:
        self._vocabulary = vocabulary
        self._is_known = vocabulary.knows(request.token_ids)
        self.committed_len = len(request.token_ids)
        # What cannot be read has no text either, and nothing is fed of it.
        self.text = (
            vocabulary.text(request) if self._is_known else SameText(request.token_ids.tolist())
        )
        self.blocks: list[int] = []
        self.keys = PrefixKeys(request.salt, block_size)
        self.num_final_blocks = 0
        self.cached_len = 0
        self.distribution = vocabulary.distribution(request)
        self.seed = request.seed
        self.length = length
        self.proposed: tuple[Int32, Int32] | None = None
        self.took_one_step = False
        # Drawn tokens whose KV stands behind that of the committed ones, as the drafter's ids.
        self._drawn: list[int] = []

    @property
    def tokens(self) -> list[int]:
        """The text in the drafter's own tokens."""
        return self.text.tokens

    @property
    def is_draftable(self) -> bool:
        """Whether anything can be drafted after the text."""
        return self._is_known and bool(self.tokens) and self.distribution.has_choice

    @property
    def next_position(self) -> int:
        """Position of the next token as its noise counts: the target's where its ids are drawn."""
        return self.committed_len if self._vocabulary.draws_target_ids else len(self.tokens)

    @property
    def memory_bytes(self) -> int:
        """Bytes of its list of tokens, the integers included."""
        return len(self.tokens) * TOKEN_BYTES

    def extend(self, tokens: Int32) -> None:
        """Append committed target ids; the KV of drawn tokens is kept as far as they agree."""
        self._is_known = self._is_known and self._vocabulary.knows(tokens)
        added = tokens.tolist()
        self.committed_len += len(added)
        self.proposed = None
        self.took_one_step = False
        self.distribution.append(added)
        if not self._is_known:
            return
        old_len = len(self.tokens)
        kept = self.text.extend(added)
        if kept < old_len:
            self.keys.cut(kept)
        new = self.tokens[old_len:] if kept == old_len else []
        agreed = num_equal(self._drawn, new)
        self.cached_len = min(self.cached_len + agreed, kept + len(new))
        # There may be more behind these.
        self._drawn = self._drawn[agreed:] if 0 < agreed == len(new) else []
        self.took_one_step = len(added) <= self.length.observe(new) + 1

    def may_follow(self, assumed: Sequence[int]) -> bool:
        """Whether tokens can be drafted behind the text and these."""
        return self.is_draftable and self._vocabulary.knows(np.array(assumed, dtype=np.int32))

    def end(self, assumed: Sequence[int] = ()) -> TextEnd:
        """The end of the text, with these behind it, which `may_follow`."""
        distribution = self.distribution.copy()
        if not assumed:
            text, num_kept = self.text, len(self.tokens)
        else:
            text, num_kept = self.text.behind(assumed)
            distribution.append(list(assumed))
        length = self.committed_len + len(assumed)
        position = length if self._vocabulary.draws_target_ids else len(text.tokens)
        choice = CoupledChoice(distribution.temperature, self.seed, length)
        return TextEnd(text, num_kept, position, choice, distribution)

    def rewind(self, end: TextEnd) -> int:
        """Position of the first token to feed: the last one of the text, and of what is assumed to
        follow it, is fed again if need be.

        Its row draws the next token. What the cache holds beyond it will be overwritten: where
        the text's own last tokens change with what is assumed, these too.
        """
        num_kept, added = end.num_kept, end.added
        self.forget_behind(num_kept)
        agreed = num_equal(self._drawn, added) if self.cached_len == num_kept else 0
        self._drawn = added[:agreed]
        position = max(0, min(self.cached_len + agreed, num_kept + len(added) - 1))
        self.cached_len = min(position, num_kept)
        return position

    def forget_behind(self, num_kept: int) -> None:
        """Note that the cache will not hold more of the text than its first tokens."""
        if num_kept < len(self.tokens):
            self.cached_len = min(self.cached_len, num_kept)
            self._drawn = []

    def keep_cache(self, job: ChainJob, end: TextEnd) -> None:
        """Take over what a job has fed of the text, what was assumed to follow it, and its own."""
        if self.blocks:
            self.cached_len = min(job.position, end.num_kept)
            drawn = [*end.added, *job.fed] if end.num_kept == len(self.tokens) else []
            self._drawn = drawn[: max(0, job.position - end.num_kept)]

    def take_prefix(self, blocks: list[int], block_size: int) -> None:
        """Begin with blocks that hold the first tokens already."""
        self.blocks = blocks
        self.num_final_blocks = len(blocks)
        self.cached_len = len(blocks) * block_size

    def keep_blocks(self, count: int, block_size: int) -> None:
        """Note that all blocks but the first ones were given back, and what they hold is lost."""
        del self.blocks[count:]
        self.num_final_blocks = min(self.num_final_blocks, count)
        self.cached_len = min(self.cached_len, count * block_size)
        self._drawn = []


class PrefixCache:
    """Gives blocks to texts, and keeps unused ones until their room is needed."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._pool = BlockPool(num_blocks, block_size)
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
        if is_new:
            self._share(text)
        needed = self._pool.blocks_for(len(text.tokens) + num_fed)
        try:
            text.blocks.extend(self._pool.allocate(max(0, needed - len(text.blocks))))
        except CapacityError:
            self.release(text)
            raise
        if is_new:
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
        if not text.blocks:
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
