"""How often each token of a text is in the answer, for penalties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..arrays import Int32

FIRST_ROOM = 16


class TokenCounts:
    """Distinct tokens of a text, those of the prompt first, and how often each is in the answer.

    They are kept as arrays, which grow with the text: a step of a long one must not go through all
    of it.

    num_in_prompt  so many of them are in the prompt
    """

    __slots__ = ("_counts", "_index_of", "_tokens", "num_in_prompt")

    def __init__(self, prompt: Iterable[int]) -> None:
        self._index_of = {token: i for i, token in enumerate(dict.fromkeys(prompt))}
        self.num_in_prompt = len(self._index_of)
        self._tokens = np.fromiter(self._index_of, dtype=np.int32, count=self.num_in_prompt)
        self._counts = np.zeros(self.num_in_prompt, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._index_of)

    def append(self, tokens: Iterable[int]) -> None:
        """Count tokens of the answer."""
        for token in tokens:
            index = self._index_of.get(token)
            if index is None:
                self._add(token)
            else:
                self._counts[index] += 1

    def beside(self, tokens: Sequence[int]) -> tuple[Int32, Int32, Int32]:
        """Distinct tokens of the text and of these, int32 [u], and the counts of the text's alone.

        Last comes where each of `tokens` stands among them. New arrays.
        """
        count, others = len(self), dict[int, int]()
        places = []
        for token in tokens:
            index = self._index_of.get(token)
            places.append(others.setdefault(token, count + len(others)) if index is None else index)
        counts = np.zeros(count + len(others), dtype=np.int32)
        counts[:count] = self._counts[:count]
        added = np.fromiter(others, dtype=np.int32, count=len(others))
        distinct = np.concatenate((self._tokens[:count], added))
        return distinct, counts, np.array(places, dtype=np.int32)

    def _add(self, token: int) -> None:
        index = self._index_of[token] = len(self._index_of)
        if index == len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * index + FIRST_ROOM)
            self._counts = np.resize(self._counts, 2 * index + FIRST_ROOM)
        self._tokens[index], self._counts[index] = token, 1

    def copy(self) -> TokenCounts:
        """The same counts, to go on from apart."""
        other = TokenCounts(())
        other.num_in_prompt = self.num_in_prompt
        other._index_of = self._index_of.copy()
        other._tokens, other._counts = self._tokens.copy(), self._counts.copy()
        return other
