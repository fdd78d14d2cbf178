"""Sequences of tokens that an answer may not hold, node by node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..arrays import ROOT, UInt32
from ..tree.tree import TokenTree
from .token_mask import mask_of, num_words

EVERY = ~np.uint32(0)


class BannedSequences:
    """Forbids the last token of a sequence wherever the answer ends with the tokens before it.

    What a row forbids depends on the answer that it follows alone, so on nothing that was drafted
    beside it. A sequence that begins in the prompt does not count.
    """

    __slots__ = ("_allowed_after", "_lengths", "_num_words")

    def __init__(self, sequences: Iterable[Sequence[int]], vocab_size: int) -> None:
        """`sequences` are not empty; those with a token outside the vocabulary cannot come."""
        last: dict[tuple[int, ...], set[int]] = {}
        for sequence in sequences:
            *before, end = sequence
            if all(0 <= token < vocab_size for token in sequence):
                last.setdefault(tuple(before), set()).add(end)
        self._allowed_after = {before: ~mask_of(ends, vocab_size) for before, ends in last.items()}
        self._lengths = sorted({len(before) for before in last})
        self._num_words = num_words(vocab_size)

    @property
    def lookback(self) -> int:
        """Tokens before a row that decide what it forbids."""
        return max(self._lengths, default=0)

    def masks(self, tree: TokenTree, answered: Sequence[int]) -> UInt32 | None:
        """uint32 [1 + nodes, words]: the tokens allowed after the root and after each node.

        None where all are. `answered` are the committed tokens of the answer, or the last
        `lookback` of them.
        """
        found: dict[int, UInt32] = {}
        for row, text in enumerate(self._texts(tree, answered)):
            for length in self._lengths:
                before = text[len(text) - length :] if length <= len(text) else None
                allowed = None if before is None else self._allowed_after.get(before)
                if allowed is not None:
                    found[row] = found[row] & allowed if row in found else allowed
        if not found:
            return None
        masks = np.full((1 + len(tree), self._num_words), EVERY, dtype=np.uint32)
        for row, allowed in found.items():
            masks[row] = allowed
        return masks

    def _texts(self, tree: TokenTree, answered: Sequence[int]) -> list[tuple[int, ...]]:
        """The last tokens before each row: those of the answer and of the row's path."""
        most = self.lookback
        root = tuple(answered[max(len(answered) - most, 0) :])
        texts: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            text = (*(root if parent == ROOT else texts[parent]), token)
            texts.append(text[max(len(text) - most, 0) :])
        return [root, *texts]
