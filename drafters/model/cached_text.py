"""A request's text, and the part of it that a drafter's KV cache holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.arrays import Int32
from ...core.proposals import DraftRequest
from .chain_job import ChainJob
from .chain_length import ChainLength, num_equal
from .text_distribution import TextDistribution

# A Python number and a place in a list.
TOKEN_BYTES = 36


class CachedText:
    """The committed tokens of a request, and how many of them the KV cache holds.

    blocks        KV blocks, in order of positions
    cached_len    positions 0 to cached_len - 1 of the cache are those of the committed tokens
    distribution  how the token after the text is chosen
    length        decides how long the chains after the text become
    proposed      tokens and parents of the last proposal, until it was decided about
    is_draftable  false once the text holds an id that the model does not have, and where the model
                  has no token that may be chosen
    """

    __slots__ = (
        "_drawn",
        "_vocab_size",
        "blocks",
        "cached_len",
        "distribution",
        "is_draftable",
        "length",
        "proposed",
        "tokens",
    )

    def __init__(self, request: DraftRequest, vocab_size: int, length: ChainLength) -> None:
        self.tokens: list[int] = request.token_ids.tolist()
        self.blocks: list[int] = []
        self.cached_len = 0
        self.distribution = TextDistribution.of(request, vocab_size)
        self.length = length
        self.proposed: tuple[Int32, Int32] | None = None
        self._vocab_size = vocab_size
        self.is_draftable = self.distribution.has_choice and self._knows(request.token_ids)
        # Drawn tokens whose KV stands behind that of the committed ones.
        self._drawn: list[int] = []

    @property
    def committed_len(self) -> int:
        """Tokens of the text."""
        return len(self.tokens)

    @property
    def memory_bytes(self) -> int:
        """Bytes of its list of tokens, the integers included."""
        return len(self.tokens) * TOKEN_BYTES

    def extend(self, tokens: Int32) -> None:
        """Append committed tokens; the KV of drawn ones is kept as far as they agree."""
        self.is_draftable &= self._knows(tokens)
        added = tokens.tolist()
        agreed = num_equal(self._drawn, added)
        self.cached_len += agreed
        # What was drafted ahead stands behind these.
        self._drawn = self._drawn[agreed:] if agreed == len(added) else []
        self.proposed = None
        self.length.observe(tokens)
        self.tokens.extend(added)
        self.distribution.append(added)

    def may_follow(self, assumed: Sequence[int]) -> bool:
        """Whether tokens can be drafted behind the text and these."""
        return self.is_draftable and all(0 <= token < self._vocab_size for token in assumed)

    def rewind(self, assumed: Sequence[int] = ()) -> int:
        """Position of the first token to feed: the last one of the text, and of what is assumed to
        follow it, is fed again if need be.

        Its row draws the next token. What the cache holds beyond it will be overwritten.
        """
        agreed = 0
        if self.cached_len == self.committed_len:
            agreed = num_equal(self._drawn, assumed)
        self._drawn = list(assumed[:agreed])
        last = self.committed_len + len(assumed) - 1
        position = min(self.cached_len + agreed, last)
        self.cached_len = min(position, self.committed_len)
        return position

    def keep_cache(self, job: ChainJob, assumed: Sequence[int] = ()) -> None:
        """Take over what a job has fed of the text, what was assumed to follow it, and its own."""
        if self.blocks:
            self.cached_len = min(job.position, self.committed_len)
            behind = [*assumed, *job.drawn]
            self._drawn = behind[: max(0, job.position - self.committed_len)]

    def forget_cache(self) -> None:
        """Note that nothing is cached any more, since the blocks were given back."""
        self.blocks = []
        self.cached_len = 0
        self._drawn = []

    def _knows(self, tokens: Int32) -> bool:
        """Whether the model has embeddings for all; a wrong index can end a process on a GPU."""
        return bool(np.all((tokens >= 0) & (tokens < self._vocab_size)))
