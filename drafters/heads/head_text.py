"""A request's text as a head knows it: what it keeps of it, and features that it has not read."""

from __future__ import annotations

from collections import deque

import numpy as np
from torch import Tensor

from ...core.arrays import Float32, Int32
from ...core.proposals import DraftRequest, FeatureRows
from ..model.text_distribution import TextDistribution
from .networks.kept_keys import KeptKeys
from .networks.path_rows import PathRows

# A Python number and a place in a list.
TOKEN_BYTES = 36


class HeadText:
    """The committed tokens of a request, and what a head has made of the target's features of them.

    Row i of the head reads the feature of token i and token i + 1. Features that were not
    requested are missing: later rows do not attend to those tokens.

    kept          keys and values of the rows so far
    next_position  rows before it are kept or were left out
    last          what the last row said, [1, width]; None: the last token but one has no row
    path          rows of a path behind the text, which were read last
    distribution  how the token after the text is chosen
    """

    __slots__ = ("_features", "_vocab_size",
                 "distribution", "is_draftable", "kept", "last", "next_position",
                 "path", "tokens")  # fmt: skip

    def __init__(self, request: DraftRequest, vocab_size: int, num_layers: int) -> None:
        self.tokens: list[int] = request.token_ids.tolist()
        self.distribution = TextDistribution.of(request, vocab_size)
        self.kept = KeptKeys(num_layers)
        self.next_position = 0
        self.last: Tensor | None = None
        self.path: PathRows | None = None
        self._vocab_size = vocab_size
        self.is_draftable = self.distribution.has_choice and self.knows(request.token_ids)
        self._features: deque[FeatureRows] = deque()

    @property
    def committed_len(self) -> int:
        """Tokens of the text."""
        return len(self.tokens)

    @property
    def memory_bytes(self) -> int:
        """Bytes of its tokens, of keys and values, and of features that wait."""
        waiting = sum(rows.values.nbytes for rows in list(self._features))
        path = self.path
        kept = self.kept.num_bytes + (0 if path is None else path.kept.num_bytes)
        return len(self.tokens) * TOKEN_BYTES + kept + waiting

    def extend(self, tokens: Int32) -> None:
        """Append committed tokens."""
        self.is_draftable &= self.knows(tokens)
        added = tokens.tolist()
        self.tokens.extend(added)
        self.distribution.append(added)
        self.last = self.path = None

    def add_features(self, rows: FeatureRows) -> None:
        """Keep features for `take_features`; those of rows that were computed already are left."""
        if rows.position + len(rows.values) > self.next_position:
            self._features.append(rows)

    def take_features(self) -> tuple[Float32, Int32, Int32] | None:
        """Features [n, width] that wait, the tokens behind theirs and their positions, int32 [n].

        None where there are none.
        """
        values, positions = [], []
        while self._features:
            rows = self._features.popleft()
            first = max(rows.position, self.next_position)
            # The token behind the last one is not known before its commit.
            end = min(rows.position + len(rows.values), self.committed_len - 1)
            if first < end:
                values.append(rows.values[first - rows.position : end - rows.position])
                positions.append(np.arange(first, end, dtype=np.int32))
                self.next_position = end
        if not values:
            return None
        where = np.concatenate(positions)
        behind = np.array([self.tokens[position + 1] for position in where], dtype=np.int32)
        return np.concatenate(values), behind, where

    def note_rows(self, last: Tensor, max_rows: int) -> None:
        """`last` is what the newest row said; at most `max_rows` are kept, or half of them."""
        self.path = None
        if self.next_position == self.committed_len - 1:
            self.last = last
        if self.kept.num_rows > max_rows:
            self.kept.drop_oldest(self.kept.num_rows - max_rows // 2)

    def knows(self, tokens: Int32) -> bool:
        """Whether there are embeddings for all; a wrong index can end a process on a GPU."""
        return bool(np.all((tokens >= 0) & (tokens < self._vocab_size)))
