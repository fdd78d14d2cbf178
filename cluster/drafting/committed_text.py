"""A request's committed tokens, as the drafter hub keeps them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...core.arrays import Int32
from ...core.proposals import DraftRequest


class CommittedText:
    """All committed tokens of an open request; grows by appending, never changes before its end.

    `append` only stores a reference; the tokens are joined when a drafter must be opened again or
    a late proposal re-rooted, which is rare beside steps.
    """

    __slots__ = ("_chunks", "_request", "length")

    def __init__(self, request: DraftRequest) -> None:
        self._request = request
        self._chunks = [request.token_ids]
        self.length = len(request.token_ids)

    def append(self, tokens: Int32) -> None:
        """Add tokens int32 [n] at the end."""
        self._chunks.append(tokens)
        self.length += len(tokens)

    def tokens(self, start: int, stop: int) -> Int32:
        """Tokens int32 [stop - start]."""
        return self._joined()[start:stop]

    def request(self) -> DraftRequest:
        """What a drafter that does not know the request must be told: all tokens so far."""
        return replace(self._request, token_ids=self._joined())

    def _joined(self) -> Int32:
        if len(self._chunks) > 1:
            self._chunks = [np.concatenate(self._chunks)]
        return self._chunks[0]
