"""Spells bytes in a vocabulary's tokens, longest first, without looking at what is around them."""

from __future__ import annotations

from .surfaces import Vocabulary


class Speller:
    """Greedy longest match over the bytes of a vocabulary's tokens."""

    __slots__ = ("_longest", "_tokens")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens: dict[bytes, int] = {}
        for token, surface in vocabulary.pieces():
            self._tokens.setdefault(surface, token)
        self._longest = max(map(len, self._tokens), default=0)

    def spell(self, text: bytes) -> tuple[int, ...]:
        """Tokens that write `text`; bytes that no token writes are left out."""
        ids: list[int] = []
        start = 0
        while start < len(text):
            end = next(
                (
                    end
                    for end in range(min(len(text), start + self._longest), start, -1)
                    if text[start:end] in self._tokens
                ),
                None,
            )
            if end is None:
                start += 1
            else:
                ids.append(self._tokens[text[start:end]])
                start = end
        return tuple(ids)
