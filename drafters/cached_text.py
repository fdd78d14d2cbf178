"""What of a request's text a drafter's KV cache holds."""

from __future__ import annotations

import numpy as np

from ..core.types import DraftRequest, Int32
from .chain_job import ChainJob


class CachedText:
    """The committed tokens of a request, and how many of them the KV cache holds.

    blocks        KV blocks, in order of positions
    cached_len    positions 0 to cached_len - 1 of the cache are those of the committed tokens
    is_draftable  false once the text holds an id that the model does not have
    """

    __slots__ = (
        "_drawn",
        "_vocab_size",
        "blocks",
        "cached_len",
        "is_draftable",
        "seed",
        "temperature",
        "tokens",
    )

    def __init__(self, request: DraftRequest, vocab_size: int) -> None:
        self.tokens: list[int] = []
        self.blocks: list[int] = []
        self.cached_len = 0
        self.temperature = request.temperature
        self.seed = request.seed
        self.is_draftable = True
        self._vocab_size = vocab_size
        # Drawn tokens whose KV stands behind that of the committed ones.
        self._drawn: list[int] = []
        self.extend(request.token_ids)

    @property
    def committed_len(self) -> int:
        """Tokens of the text."""
        return len(self.tokens)

    def extend(self, tokens: Int32) -> None:
        """Append committed tokens; the KV of drawn ones is kept as far as they agree."""
        # The model has no embedding for other ids; a wrong index can end a process on a GPU.
        self.is_draftable &= bool(np.all((tokens >= 0) & (tokens < self._vocab_size)))
        for drawn, token in zip(self._drawn, tokens.tolist(), strict=False):
            if drawn != token:
                break
            self.cached_len += 1
        self._drawn = []
        self.tokens.extend(tokens.tolist())

    def rewind(self) -> int:
        """Position of the first token to feed: the last committed one is fed again if need be.

        Its row draws the next token. What the cache holds beyond it will be overwritten.
        """
        self.cached_len = min(self.cached_len, self.committed_len - 1)
        self._drawn = []
        return self.cached_len

    def keep_cache(self, job: ChainJob) -> None:
        """Take over what a job has fed."""
        if self.blocks:
            self.cached_len = min(job.position, self.committed_len)
            self._drawn = job.drawn[: max(0, job.position - self.committed_len)]

    def forget_cache(self) -> None:
        """Nothing is cached any more; the blocks belong to others."""
        self.blocks = []
        self.cached_len = 0
        self._drawn = []
